"""One worker that trains a transformer of few elements in PyTorch, and times its steps: what these
take more than in one process is what synchronising costs, since the bytes are few.

Started by `experiments.campaign.job`; prints a JSON line when the measured steps begin and one,
with their times, when they end.
"""

import sys

from experiments.emulation.systems import SYSTEMS

_system = SYSTEMS[sys.argv[1]]
if _system.store == "p3":
    import p3kv.torch  # first, as in any script

import argparse  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402

from experiments.emulation.telling import say  # noqa: E402

_BATCH, _LENGTH, _HEADS = 2, 16, 4
_WARM_UP = 50


def main() -> None:
    """Trains as the command line asks for: blocks of 12 tensors each, by AdamW."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("blocks", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("steps", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    block = torch.nn.TransformerEncoderLayer(
        options.width, _HEADS, 4 * options.width, dropout=0.0, batch_first=True
    )
    model: torch.nn.Module = torch.nn.TransformerEncoder(
        block, options.blocks, enable_nested_tensor=False
    )
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = p3kv.torch.Optimizer(model, inner) if _system.store == "p3" else inner
    if _system.store == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=_system.bucket_mb, gradient_as_bucket_view=True
        )
    batch = torch.randn(_BATCH, _LENGTH, options.width)
    ends_s = []
    for number in range(_WARM_UP + options.steps + 1):
        if number == _WARM_UP:
            say(event="begin")
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        ends_s.append(time.perf_counter())
    steps_s = [end - begin for begin, end in zip(ends_s, ends_s[1:])]
    say(event="end", step_s=steps_s[_WARM_UP:], tensors=len(list(model.parameters())))
    if _system.store == "ddp":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


main()
