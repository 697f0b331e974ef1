"""`python -m experiments.as_it_is [SCRIPT ...]`: trains with each script twice, on two ranks: as it
is, and in the hands of `python -m p3kv.ddp`. Says by how much losses differ, who updates the
weights, and how long a step takes. With `--mbit` or `--balanced` each rank has a host of its own,
whose link is throttled; balanced, it takes as long for the bytes that DDP sends in a step as DDP's
step takes without a limit (M/C = 1). With `--size large` gradients are megabytes, and computing is
emulated (`sizes.py`)."""

from __future__ import annotations

import argparse
import importlib.util
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
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from experiments.cluster import Cluster

HERE = Path(__file__).parent
RANKS = 2
STARTS_ITSELF = ("spawned",)
"""Scripts that start their ranks themselves."""
_NO_SCRIPTS = ("sizes", "bound")
"""What is beside them: how large their models are, and how fast they can be."""
NEEDS = {
    "accelerated": ("accelerate",),
    "lit": ("lightning",),
    "trainer": ("transformers", "accelerate"),
}
"""By script, packages whose trainers it uses. It is left out where they are not installed."""
MOST = 1e-5
"""By how much losses of 50 steps may differ, of their size: sums may have another order."""
WARM_UP = 10
"""So many steps are not timed."""
PORT = 29500
Losses = Dict[Tuple[int, int, str], float]
"""By rank, step and name."""


class Line(NamedTuple):
    """What a script has said, when, and how much the first rank's host had sent by then."""

    at_s: float
    sent_bytes: int
    text: str


class Run(NamedTuple):
    """What a script has said, line by line."""

    code: int
    lines: List[Line]

    @property
    def losses(self) -> Losses:
        """All numbers that the ranks have printed."""
        found: Losses = {}
        for line in self.lines:
            for one in re.findall(r'\{"rank".*?\}', line.text):
                said = json.loads(one)
                place = said.pop("rank"), said.pop("step")
                found.update({(*place, name): value for name, value in said.items()})
        return found

    @property
    def steps(self) -> List[Tuple[float, float]]:
        """Rank 0's steps: seconds, and bytes that its host has sent."""
        ends: Dict[int, Line] = {}
        for line in self.lines:
            for step in re.findall(r'\{"rank": 0, "step": (\d+), "loss"', line.text):
                ends.setdefault(int(step), line)
        timed = [ends[step] for step in sorted(ends) if step >= WARM_UP]
        return [
            (later.at_s - one.at_s, later.sent_bytes - one.sent_bytes)
            for one, later in zip(timed, timed[1:])
        ]

    @property
    def step(self) -> Tuple[float, float]:
        """The means of its steps: those of some stores are long and short in turns."""
        seconds, sent_bytes = map(statistics.fmean, zip(*self.steps))
        return seconds, sent_bytes

    @property
    def balanced_mbit_s(self) -> float:
        """The rate of links that take as long for what its host sends in a step as the step takes
        without a limit."""
        seconds, sent_bytes = self.step
        return max(1.0, sent_bytes * 8e-6 / seconds)

    @property
    def ways(self) -> str:
        """Who updates the weights of its optimizers."""
        update = r"trained by p3kv: (\w+), (\w+) update"
        found = [re.search(update, line.text) for line in self.lines]
        return ", ".join(dict.fromkeys(f"{one[1]}: {one[2]}" for one in found if one))

    @property
    def error(self) -> str:
        """The line that says why it has failed."""
        found = [re.search(r"\w+Error: .*", line.text) for line in self.lines]
        return next((one[0] for one in found if one), self.lines[-1].text if self.lines else "")


def script_names() -> List[str]:
    """All of this folder."""
    names = {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("__")}
    return sorted(names - {*_NO_SCRIPTS})


def run(script: Path, modules: Sequence[str]) -> Run:
    """Runs a script on two ranks, in these modules' hands."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    launcher = [] if script.stem in STARTS_ITSELF else torchrun
    command = [sys.executable, *launcher, *modules, str(script)]
    return _heard([subprocess.Popen(command, env=_environment(), **_PIPED)])


def run_on_hosts(script: Path, modules: Sequence[str], rate_mbit_s: Optional[float] = None) -> Run:
    """Runs a script on two ranks, each on a host of its own with such a link."""
    with Cluster(RANKS, rate_mbit_s) as cluster:
        job = {
            **_environment(),
            "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": cluster.hosts[0].address, "MASTER_PORT": str(PORT),
            "P3KV_SECRET": secrets.token_hex(16),
        }  # fmt: skip
        started = []
        for host in cluster.hosts:
            place = {"RANK": str(host.index), "GLOO_SOCKET_IFNAME": host.interface}
            command = [sys.executable, "-u", *modules, str(script)]
            started.append(host.popen(command, {**job, **place}, **_PIPED))
        return _heard(started, lambda: cluster.interface_counters(cluster.hosts[0])[1])


def _environment() -> Dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "P3KV_VERBOSE": "1"}


_PIPED: Dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _heard(
    processes: List[subprocess.Popen[str]], sent_bytes: Callable[[], int] = lambda: 0
) -> Run:
    lines: List[Line] = []

    def hear(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(Line(time.monotonic(), sent_bytes(), line))

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
    names = script_names()
    parser = argparse.ArgumentParser(prog="python -m experiments.as_it_is", description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(names)}")
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--mbit", type=float, metavar="RATE", help="of each host's link; needs root")
    links.add_argument("--balanced", action="store_true", help="M/C = 1; needs root")
    parser.add_argument("--size", choices=("small", "large"), default="small", help="of models")
    options = parser.parse_args(arguments)
    os.environ["SIZE"] = options.size
    throttled = options.balanced or options.mbit is not None
    chosen = options.scripts or [n for n in names if not (throttled and n in STARTS_ITSELF)]
    if not set(chosen) <= set(names):
        parser.error(f"there is no script {min(set(chosen) - set(names))}: use {', '.join(names)}")
    if throttled and set(chosen) & set(STARTS_ITSELF):
        parser.error(f"{', '.join(STARTS_ITSELF)} starts both ranks itself, on one host")
    differs = 0
    for name in chosen:
        needed = NEEDS.get(name, ())
        if not all(importlib.util.find_spec(one) for one in needed):
            print(f"{name:12} left out: pip install {' '.join(needed)}", flush=True)
            continue
        said, is_right = compare(HERE / f"{name}.py", throttled, options.mbit)
        differs += not is_right
        print(f"{name:12} {said}{'' if is_right else '  <--'}", flush=True)
    return 1 if differs else 0


def compare(script: Path, throttled: bool, rate_mbit_s: Optional[float]) -> Tuple[str, bool]:
    """Trains with and without p3kv; throttled without a rate, at M/C = 1. Returns what to say, and
    whether losses are DDP's."""
    where = ""
    if throttled and rate_mbit_s is None:
        without = run_on_hosts(script, ())
        rate_mbit_s = without.balanced_mbit_s
        where = f"; {rate_mbit_s:.0f} Mbit/s, without a limit {without.step[0] * 1e3:.1f}"
    runs = []
    for modules in ((), ("-m", "p3kv.ddp")):
        done = run_on_hosts(script, modules, rate_mbit_s) if throttled else run(script, modules)
        if done.code:
            return f"fails {'with p3kv' if modules else 'with torch alone'}: {done.error}", False
        runs.append(done)
    as_it_is, by_p3kv = runs
    differs = difference(as_it_is.losses, by_p3kv.losses)
    its_ms, ms = as_it_is.step[0] * 1e3, by_p3kv.step[0] * 1e3
    return (
        f"losses differ by {differs:.1e}; {by_p3kv.ways}; {ms:.1f} ms, DDP {its_ms:.1f} "
        f"({its_ms / ms:.2f} x){where}"
    ), differs <= MOST


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
