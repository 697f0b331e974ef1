"""Worker 0 pushes as fast as it can, worker 1 goes round by round; what comes out must be right.

Arguments: a folder, the rounds, the elements of the key. Files in the folder: each worker leaves
`ready-<rank>` and waits for `go`, and leaves `right-<rank>` in the end and waits for `end`.
"""

import p3kv  # noqa: F401, I001
import sys
from pathlib import Path

import mxnet as mx
from checks import equal, until


def main() -> None:
    folder, rounds, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = mx.kv.create("p3")
    store.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
    out = mx.nd.zeros(size)
    store.broadcast("w", mx.nd.zeros(size), out=out)
    gradient = mx.nd.full(size, store.rank + 1)
    mx.nd.waitall()
    (folder / f"ready-{store.rank}").touch()
    until((folder / "go").exists)
    if store.rank == 1:
        until((folder / "pushed").exists)
    for round_ in range(1, rounds + 1):
        store.push("w", gradient)
        if store.rank == 1:
            store.pull("w", out=out)
            assert (out >= 3 * round_).asnumpy().all()
    if store.rank == 0:
        (folder / "pushed").touch()
    store.pull("w", out=out)
    equal(out, mx.nd.full(size, 3 * rounds).asnumpy())
    (folder / f"right-{store.rank}").touch()
    until((folder / "end").exists)


main()
