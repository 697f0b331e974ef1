"""Children of a script: python torch_children.py spawn, elastic, or what a worker's children do."""

import p3kv.torch  # noqa: I001
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, List

import torch
from torch.utils.data import DataLoader


def trained(steps: int = 2) -> str:
    """Takes rank + 1, in the mean of all workers, in each step; a data loader's helper reads."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(os.environ.get("RANK", "0")))
    optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), 1.0))
    for x in DataLoader([torch.full((1,), optimizer.rank + 1.0)] * steps, num_workers=1):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return f"{optimizer.rank} of {optimizer.num_workers} has {model.weight.item()}"


def ranked(rank: int) -> None:
    """A child that gets its rank as `torch.multiprocessing.spawn` has scripts give it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = sys.argv[2]
    if rank == 0:
        print(trained(), flush=True)
        return
    # What it starts must not end with this thread.
    thread = threading.Thread(target=lambda: print(trained(), flush=True))
    thread.start()
    thread.join()


def fails() -> None:
    print(trained(1), flush=True)
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    trained()


def alone() -> None:
    del os.environ["DMLC_ROLE"]
    os.environ["WORLD_SIZE"] = "1"
    print("alone:", trained(), flush=True)


def makes_an_optimizer() -> None:
    trained()


def saves(folder: Path, by: str) -> None:
    """Trains until SIGTERM, and then asks the servers for its optimizer's state. `by` whom: by
    worker 0, to the launcher, when it has just looked, or by the test."""
    wishes: List[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: wishes.append(signum))
    model = torch.nn.Linear(1, 1)
    optimizer = p3kv.torch.Optimizer(model, torch.optim.Adam(model.parameters()))
    steps = 0
    while not wishes:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.wait()
        (folder / str(optimizer.rank)).touch()
        steps += 1
        if by == "worker" and optimizer.rank == 0 and steps == 3:
            os.kill(os.getppid(), signal.SIGTERM)
            if not wishes:
                continue
        time.sleep(0.02)
    time.sleep(0.5)
    assert len(optimizer.state_dict()["state"]) == 2
    print(f"{optimizer.rank} saved", flush=True)


def child(method: str, function: Any) -> int:
    process = multiprocessing.get_context(method).Process(target=function)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def main(how: str) -> None:
    if how == "spawn":
        torch.multiprocessing.spawn(ranked, nprocs=2)
    elif how == "elastic":
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
        config.max_restarts = 0
        elastic_launch(config, fails)()
    elif how == "saves":
        saves(Path(sys.argv[2]), sys.argv[3])
    elif how == "group":
        torch.distributed.init_process_group("gloo")
        ranks = torch.tensor([float(torch.distributed.get_rank() + 1)])
        torch.distributed.all_reduce(ranks)
        print(f"all ranks: {ranks.item()};", trained(), flush=True)
    elif how == "no rank":
        assert child("fork", makes_an_optimizer) == 1
    else:
        assert child("spawn", makes_an_optimizer) == 1
        assert child("fork", makes_an_optimizer) == 1
        assert child("fork", alone) == 0
        code = "import p3kv.errors, p3kv.torch, torch\nmodel = torch.nn.Linear(1, 1)\n"
        code += "try: p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), 1.0))\n"
        code += "except p3kv.errors.ConfigError as error: print(error)"
        subprocess.run([sys.executable, "-c", code], check=True)
        print(trained(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
