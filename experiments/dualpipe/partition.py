"""Cuts a model into stages of consecutive layers, one for each worker."""

from __future__ import annotations

from itertools import accumulate
from typing import List, NamedTuple, Sequence, Tuple

from p3kv.report.forecast import Model
from p3kv.report.forecast.simulator import FLOAT32_BYTES


class Stage(NamedTuple):
    """Layers that one worker computes, and what a batch costs there.

    `layers`: how many. `activation_bytes`: what it sends to the next stage, of which the gradient
    comes back as large; 0 of the last stage.
    """

    layers: int
    forward_s: float
    backward_s: float
    activation_bytes: int


def partition(model: Model, workers: int, rate_bytes_s: float) -> List[Stage]:
    """Cuts `model` for as many `workers`, over links of `rate_bytes_s`, as PipeDream does.

    The optimizer of PipeDream (arXiv:1806.03377), for stages of one worker: the slowest of all
    stages and cuts is as fast as can be. A stage takes its forward and its backward pass, and a cut
    twice the time of its activations. Among equally fast partitions, one that sends fewer bytes.
    ValueError if the model has fewer layers than there are workers.
    """
    count = len(model.layers)
    if not 1 <= workers <= count:
        raise ValueError(f"{model.name} has {count} layers, which {workers} workers can't share")
    ends_s = [0.0, *accumulate(f + b for f, b in zip(model.forward_s, model.backward_s))]
    crossing_bytes = [layer.crossing_elems * FLOAT32_BYTES for layer in model.layers]

    # For each number of first layers: the cost of their best partition, and where its stages end.
    best: List[Tuple[float, int, Tuple[int, ...]]] = [
        (s, 0, (end,)) for end, s in enumerate(ends_s)
    ]
    for stages in range(2, workers + 1):
        best = [
            min(
                (
                    (
                        max(
                            best[cut][0],
                            2 * crossing_bytes[cut - 1] / rate_bytes_s,
                            ends_s[end] - ends_s[cut],
                        ),
                        best[cut][1] + crossing_bytes[cut - 1],
                        (*best[cut][2], end),
                    )
                    for cut in range(stages - 1, end)
                ),
                default=best[end],  # fewer layers than stages: no cut uses it
            )
            for end in range(count + 1)
        ]
    return _stages(model, best[count][2])


def _stages(model: Model, ends: Sequence[int]) -> List[Stage]:
    return [
        Stage(
            layers=end - begin,
            forward_s=sum(model.forward_s[begin:end]),
            backward_s=sum(model.backward_s[begin:end]),
            activation_bytes=model.layers[end - 1].crossing_elems * FLOAT32_BYTES,
        )
        for begin, end in zip([0, *ends], ends)
    ]
