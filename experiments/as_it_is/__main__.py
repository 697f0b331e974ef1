"""`python -m experiments.as_it_is [SCRIPT ...]`: trains with each script twice, on two ranks that
torchrun starts: as it is, and in the hands of `python -m p3kv.ddp`. Says by how much losses differ,
and who updates the weights."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

HERE = Path(__file__).parent
RANKS = 2
STARTS_ITSELF = ("spawned",)
"""Scripts that start their ranks themselves."""
MOST = 1e-5
"""By how much losses of 50 steps may differ, of their size: sums may have another order."""
Losses = Dict[Tuple[int, int, str], float]
"""By rank, step and name."""


class Run(NamedTuple):
    """What a script has said."""

    losses: Losses
    wall_s: float
    code: int
    output: str

    @property
    def ways(self) -> str:
        """Who updates the weights of its optimizers."""
        found = re.findall(r"trained by p3kv: (\w+), (\w+) update", self.output)
        return ", ".join(dict.fromkeys(f"{name}: {who}" for name, who in found))

    @property
    def error(self) -> str:
        """The line that says why it has failed."""
        found = re.search(r"\w+Error: .*", self.output)
        return found[0] if found else self.output[-300:]


def run(script: Path, *modules: str) -> Run:
    """Runs a script on two ranks, in these modules' hands."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    if script.stem in STARTS_ITSELF:
        launcher = []
    command = [sys.executable, *launcher, *modules, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "P3KV_VERBOSE": "1"}
    begin_s = time.monotonic()
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    losses: Losses = {}
    for found in re.findall(r'\{"rank".*?\}', result.stdout):
        said = json.loads(found)
        place = said.pop("rank"), said.pop("step")
        losses.update({(*place, name): value for name, value in said.items()})
    return Run(losses, time.monotonic() - begin_s, result.returncode, result.stdout)


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
    chosen = parser.parse_args(arguments).scripts or names
    if not set(chosen) <= set(names):
        parser.error(f"there is no script {min(set(chosen) - set(names))}: use {', '.join(names)}")
    wrong = 0
    for name in chosen:
        script = HERE / f"{name}.py"
        as_it_is, by_p3kv = run(script), run(script, "-m", "p3kv.ddp")
        if as_it_is.code:
            said = f"fails with torch alone: {as_it_is.error}"
        elif by_p3kv.code:
            said = f"fails with p3kv: {by_p3kv.error}"
        else:
            differs = difference(as_it_is.losses, by_p3kv.losses)
            said = f"losses differ by {differs:.1e}; {by_p3kv.ways}"
            if differs <= MOST:
                print(f"{name:12} {said}", flush=True)
                continue
        wrong += 1
        print(f"{name:12} {said}  <-- ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
