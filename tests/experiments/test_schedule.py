"""What a recorded trace shows of a run over slow links: P3's order of things."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest

from experiments.campaign.measure import Run, measure
from experiments.cluster import Cluster, missing_requirements
from p3kv.common.tracing import RECEIVE, SEND, Span
from p3kv.tools.timeline import Timeline, read_job

_PROBLEM = missing_requirements()
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM)),
]

FIRST, LAST = 0, 2
"""Keys of the first and the last layer: without biases each layer has one."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trace")
    with Cluster(2, 50.0) as cluster:
        # A small network has small slices here, of which the kernel may hold little, too. About
        # ten leave during a forward pass: a process that gets no core for some of them is no error.
        result = measure(
            cluster, "p3kv", "three_layers", iterations=6, spans=True, timeout_s=60, dilation=2.0,
            P3KV_SLICE_SIZE=2_500, P3KV_SEND_BUFFER_BYTES=65_536, P3KV_TRACE=folder,
        )  # fmt: skip
    return result, read_job(folder)


def spans(timeline: Timeline, kind: str) -> List[Tuple[int, Span]]:
    """What worker 0 recorded of a kind, with keys; times are the scheduler's, whose clock this
    machine shares."""
    worker = timeline.of_role("worker")[0]
    return [(timeline.keys[s.key_id].key, s) for s in worker.spans if s.kind == kind]


def computing(run: Run, phase: str) -> List[Dict[str, Any]]:
    """Worker 0's emulated forward or backward operations, in order."""
    return [span for span in run.spans[0] if span["phase"] == phase]


def test_early_layers_overtake_queued_late_layers(run: Any) -> None:
    sends = spans(run[1], SEND)
    early = [span for key, span in sends if key == FIRST and span.round > 1]
    late = [span for key, span in sends if key == LAST and span.round > 1]
    overtakings = sum(
        e.since_ns > l.since_ns and e.end_ns < l.start_ns
        for l in late  # noqa: E741
        for e in early
    )
    assert overtakings > len(early), "slices queued later, for a layer needed earlier, left first"


def test_the_next_forward_pass_starts_before_the_last_update_arrives(run: Any) -> None:
    received = spans(run[1], RECEIVE)
    forwards = [span for span in computing(run[0], "forward") if span["layer"].endswith("dense0")]
    assert len(forwards) >= 7
    early_starts = 0
    for span in forwards[2:]:
        # Iteration i, counted from 0, needs the values of round i.
        last_ns = max(
            one.end_ns for key, one in received if key == LAST and one.round == span["iteration"]
        )
        early_starts += span["start_ns"] < last_ns
    assert early_starts == len(forwards[2:])


def test_slices_are_sent_during_backward_and_during_forward(run: Any) -> None:
    ends_ns = [span.end_ns for _, span in spans(run[1], SEND) if span.round > 1]
    for phase in ("forward", "backward"):
        computed = [s for s in computing(run[0], phase) if s["iteration"] >= 2]
        iterations = {s["iteration"] for s in computed}
        for iteration in iterations - {max(iterations)}:
            inside = [
                end
                for end in ends_ns
                for s in computed
                if s["iteration"] == iteration and s["start_ns"] <= end <= s["end_ns"]
            ]
            assert inside, f"nothing was sent during the {phase} pass of iteration {iteration}"


def test_a_layer_waits_for_its_own_weights_only(run: Any) -> None:
    received = spans(run[1], RECEIVE)
    for span in computing(run[0], "forward"):
        if span["iteration"] < 2:
            continue
        layer = int(span["layer"][-1])
        arrived_ns = [
            one.end_ns for key, one in received if key == layer and one.round == span["iteration"]
        ]
        assert arrived_ns, span
        assert max(arrived_ns) <= span["start_ns"]
