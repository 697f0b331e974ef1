"""Figures of few cases, each on a cluster of its own: measured in turns, resumed where it stopped.

Repetitions are outermost, as in `experiments.campaign.campaign`.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, Sequence

from tqdm import tqdm

from experiments.campaign import machine, options
from experiments.campaign.measure import Run
from experiments.campaign.records import Records
from experiments.cluster import missing_requirements


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser with what every such figure takes."""
    made = options.arguments(description)
    made.add_argument("--quick", action="store_true", help="less, into files of its own name")
    made.add_argument("--draw", action="store_true", help="measure nothing, draw what is there")
    return made


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with what a figure takes that measures iterations."""
    made = arguments(description)
    made.add_argument("--repetitions", type=int, default=3, metavar="N")
    made.add_argument("--iterations", type=int, default=3, metavar="N")
    made.add_argument("--warm-up", type=int, default=2, metavar="N")
    return made


def facts(run: Run) -> Dict[str, Any]:
    """What a figure keeps of a run."""
    return {
        "rate_mbit_s": run.rate_mbit_s,
        "dilation": run.dilation,
        "compute_s": run.compute_s,
        "iteration_s": [round(seconds, 5) for seconds in run.iteration_s],
        "cpu_s": round(run.cpu_s, 2),
    }


def measure(
    records: Records,
    chosen: argparse.Namespace,
    cases: Sequence[Any],
    run: Callable[[Any, int, int], Dict[str, Any]],
) -> None:
    """Measures iterations, with the options of `parser`: `measure_each` of all repetitions.

    `cases` are those of one repetition. `run` measures one, with so many iterations after so many
    to warm up.
    """
    turns = list(cases) * (1 if chosen.quick else chosen.repetitions)
    measure_each(records, chosen, turns, lambda one: run(one, chosen.iterations, chosen.warm_up))


def measure_each(
    records: Records,
    chosen: argparse.Namespace,
    cases: Sequence[Any],
    run: Callable[[Any], Dict[str, Any]],
) -> None:
    """Measures what is not in the records yet, with the options of `arguments`; nothing with
    --draw.

    A case is a NamedTuple; one that is there twice is measured twice. `run` returns what it has
    measured beside the case's fields.
    """
    if chosen.draw:
        return
    problem = missing_requirements()
    if problem is not None:
        raise SystemExit(problem)
    place = records.begin(machine.describe("cubic"))
    todo = list(cases)
    for known in records.runs:
        done = next((one for one in todo if one._asdict().items() <= known.items()), None)
        if done is not None:
            todo.remove(done)
    with tqdm(todo) as bar:
        for case in bar:
            bar.set_description(", ".join(map(str, case)))
            records.add_run({**case._asdict(), **run(case), "machine": place})
