"""In which order the workers of a pipeline compute: DualPipe, and PipeDream's 1F1B.

Worker k, counted from 0, has stage k. A batch passes all stages forward, then backward. Nothing
here knows how long anything takes.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

FORWARD, BACKWARD = "forward", "backward"


class Step(NamedTuple):
    """A pass of a batch through a worker's stage.

    `unit`: none begins before all steps of earlier units have ended. Plans without time units have
    all steps in unit 0.
    """

    unit: int
    kind: str
    batch: int


Plan = List[List[Step]]
"""By worker, its steps in the order in which it computes them."""

Pass = Tuple[str, int, int]
"""Kind, worker, batch."""


def input_of(kind: str, worker: int, batch: int, workers: int) -> Optional[Pass]:
    """The pass that makes the input of this one; None if that is training data."""
    if kind == FORWARD:
        return (FORWARD, worker - 1, batch) if worker else None
    if worker == workers - 1:
        return FORWARD, worker, batch
    return BACKWARD, worker + 1, batch


def dualpipe(workers: int, batches: int) -> Plan:
    """Algorithm 1: in each time unit, every worker passes one batch forward and another backward.

    Both inputs are fetched when the unit begins, outputs are there in the next one, and weights are
    updated between. The last worker has no input for its backward pass before its forward pass has
    ended, so it computes them "in sequence" (section 3.1): both are of the same batch.
    """
    plan: Plan = [[] for _ in range(workers)]
    last = workers - 1
    forward_buffer: List[Optional[int]] = [None] * workers
    backward_buffer: List[Optional[int]] = [None] * workers
    for unit in range(batches + 2 * last):
        forward_buffer[0] = unit if unit < batches else None
        fetched = [*zip(plan, forward_buffer, backward_buffer)]
        forward_buffer, backward_buffer = [None] * workers, [None] * workers
        for worker, (steps, forward, backward) in enumerate(fetched):
            if forward is not None:
                steps.append(Step(unit, FORWARD, forward))
                if worker == last:
                    backward = forward
                else:
                    forward_buffer[worker + 1] = forward
            if backward is not None:
                steps.append(Step(unit, BACKWARD, backward))
                if worker > 0:
                    backward_buffer[worker - 1] = backward
    return plan


def one_forward_one_backward(workers: int, batches: int, ahead: int = 1) -> Plan:
    """PipeDream's 1F1B: a worker passes some batches forward, then one each way in turn.

    There are `ahead` more of these first batches for each worker behind it. With 1, as many batches
    are under way as there are workers; with 2, this is DualPipe's order. No time units: a worker
    goes on when its next input is there.
    """
    plan: Plan = []
    for worker in range(workers):
        first = min(ahead * (workers - 1 - worker), batches)
        steps = [Step(0, FORWARD, batch) for batch in range(first)]
        for batch in range(batches):
            if batch + first < batches:
                steps.append(Step(0, FORWARD, batch + first))
            steps.append(Step(0, BACKWARD, batch))
        plan.append(steps)
    return plan


def in_units(plan: Plan) -> Plan:
    """The same order in time units, of which each worker computes one step at most in each.

    This is PipeDream as the paper draws it (section 3.1, figure 6a).
    """
    made: Dict[Pass, int] = {}
    units: Plan = [[] for _ in plan]
    unit = 0
    while any(len(done) < len(steps) for done, steps in zip(units, plan)):
        for worker, (done, steps) in enumerate(zip(units, plan)):
            if len(done) == len(steps):
                continue
            _, kind, batch = steps[len(done)]
            source = input_of(kind, worker, batch, len(plan))
            if source is None or made.get(source, unit) < unit:
                done.append(Step(unit, kind, batch))
                made[kind, worker, batch] = unit
        unit += 1
    return units


def version_difference(kind: str, worker: int, workers: int) -> int:
    """s of equations 5 and 6: how many versions ahead SpecTrain predicts a worker's weights."""
    return 2 * workers - worker - 2 if kind == FORWARD else worker


def staleness(plan: Plan, worker: int, batch: int) -> int:
    """How often `worker` updates its weights between the passes of `batch` through its stage."""
    kinds = [(step.kind, step.batch) for step in plan[worker]]
    between = kinds[kinds.index((FORWARD, batch)) + 1 : kinds.index((BACKWARD, batch))]
    return sum(kind == BACKWARD for kind, _ in between)
