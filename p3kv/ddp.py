"""`python -m p3kv.ddp SCRIPT [ARGS ...]`: a script that wraps its model in torch's
DistributedDataParallel, which p3kv trains."""

import sys

from p3kv.tools.commands import run

if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -m p3kv.ddp SCRIPT [ARGS ...]")
    sys.exit(run.run(sys.argv[1], sys.argv[2:], ddp=True))
