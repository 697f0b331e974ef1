"""`python -m experiments.as_it_is [SCRIPT ...]`: trains with each script twice, on two ranks: as it
is, and in the hands of `python -m p3kv.ddp`. Says by how much losses differ, who updates the
weights, and how long a step takes. By `--mbit` each rank has a host of its own, whose link is
throttled."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from experiments.cluster import Cluster

HERE = Path(__file__).parent
RANKS = 2
STARTS_ITSELF = ("spawned",)
"""Scripts that start their ranks themselves."""
MOST = 1e-5
"""By how much losses of 50 steps may differ, of their size: sums may have another order."""
WARM_UP = 10
"""So many steps are not timed."""
PORT = 29500
Losses = Dict[Tuple[int, int, str], float]
"""By rank, step and name."""


class Run(NamedTuple):
    """What a script has said, line by line, and when."""

    code: int
    lines: List[Tuple[float, str]]

    @property
    def losses(self) -> Losses:
        """All numbers that the ranks have printed."""
        found: Losses = {}
        for _, line in self.lines:
            for one in re.findall(r'\{"rank".*?\}', line):
                said = json.loads(one)
                place = said.pop("rank"), said.pop("step")
                found.update({(*place, name): value for name, value in said.items()})
        return found

    @property
    def step_s(self) -> float:
        """The median time of a step of rank 0's."""
        ends_s: Dict[int, float] = {}
        for at_s, line in self.lines:
            for step in re.findall(r'\{"rank": 0, "step": (\d+), "loss"', line):
                ends_s.setdefault(int(step), at_s)
        timed = [ends_s[step] for step in sorted(ends_s) if step >= WARM_UP]
        return statistics.median(later - one for one, later in zip(timed, timed[1:]))

    @property
    def ways(self) -> str:
        """Who updates the weights of its optimizers."""
        found = [re.search(r"trained by p3kv: (\w+), (\w+) update", line) for _, line in self.lines]
        return ", ".join(dict.fromkeys(f"{one[1]}: {one[2]}" for one in found if one))

    @property
    def error(self) -> str:
        """The line that says why it has failed."""
        found = [re.search(r"\w+Error: .*", line) for _, line in self.lines]
        return next((one[0] for one in found if one), self.lines[-1][1] if self.lines else "")


def run(script: Path, modules: Tuple[str, ...], rate_mbit_s: Optional[float]) -> Run:
    """Runs a script on two ranks, in these modules' hands."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "P3KV_VERBOSE": "1"}
    if rate_mbit_s is None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        launcher = [] if script.stem in STARTS_ITSELF else torchrun
        command = [sys.executable, *launcher, *modules, str(script)]
        return _heard([subprocess.Popen(command, env=environment, **_PIPED)])
    with Cluster(RANKS, rate_mbit_s) as cluster:
        job = {
            "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": cluster.hosts[0].address, "MASTER_PORT": str(PORT),
            "P3KV_SECRET": secrets.token_hex(16),
        }  # fmt: skip
        return _heard(
            [
                host.popen(
                    [sys.executable, "-u", *modules, str(script)],
                    {
                        **environment, **job,
                        "RANK": str(host.index), "GLOO_SOCKET_IFNAME": host.interface,
                    },
                    **_PIPED,
                )
                for host in cluster.hosts
            ]
        )  # fmt: skip


_PIPED: Dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _heard(processes: List[subprocess.Popen[str]]) -> Run:
    lines: List[Tuple[float, str]] = []

    def hear(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic(), line))

    threads = [threading.Thread(target=hear, args=(one,)) for one in processes]
    for thread in threads:
        thread.start()
    codes = [process.wait() for process in processes]
    for thread in threads:
        thread.join()
    return Run(max(map(abs, codes)), lines)


def difference(one: Losses, other: Losses) -> float:
    """The largest one between losses, of their size; infinity where some are missing."""
    if not one or one.keys() != other.keys():
        return float("inf")
    return max(abs(one[at] - other[at]) / max(1.0, abs(one[at])) for at in one)


def main(arguments: List[str]) -> int:
    """Returns the exit code: 1 if a script's losses differ, or it is refused."""
    names = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("__"))
    parser = argparse.ArgumentParser(prog="python -m experiments.as_it_is", description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--mbit", type=float, metavar="RATE", help="of each host's link; needs root"
    )
    options = parser.parse_args(arguments)
    chosen, rate_mbit_s = options.scripts or names, options.mbit
    if not set(chosen) <= set(names):
        parser.error(f"there is no script {min(set(chosen) - set(names))}: use {', '.join(names)}")
    wrong = 0
    for name in chosen:
        script = HERE / f"{name}.py"
        as_it_is, by_p3kv = (run(script, way, rate_mbit_s) for way in ((), ("-m", "p3kv.ddp")))
        if as_it_is.code or by_p3kv.code:
            failed = as_it_is if as_it_is.code else by_p3kv
            said = f"fails {'with torch alone' if as_it_is.code else 'with p3kv'}: {failed.error}"
            differs = float("inf")
        else:
            differs = difference(as_it_is.losses, by_p3kv.losses)
            its_ms, ms = as_it_is.step_s * 1e3, by_p3kv.step_s * 1e3
            said = f"losses differ by {differs:.1e}; {by_p3kv.ways}; {ms:.1f} ms, DDP {its_ms:.1f}"
        wrong += differs > MOST
        print(f"{name:12} {said}{'  <--' * (differs > MOST)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
