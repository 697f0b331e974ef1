"""What a recorded trace shows of a run over slow links: P3's order of things."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest

from experiments.campaign.measure import Run, measure
from experiments.cluster import Cluster, missing_requirements
from p3kv.trace import read_trace

_PROBLEM = missing_requirements()
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM)),
]

FIRST, LAST = "0", "2"
"""Keys of the first and the last layer: without biases each layer has one."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trace")
    with Cluster(2, 100.0) as cluster:
        # A small network has small slices here, of which the kernel may hold little, too.
        result = measure(
            cluster, "p3kv", "three_layers", iterations=6, spans=True, timeout_s=60,
            P3KV_SLICE_SIZE=10_000, P3KV_SEND_BUFFER_BYTES=65_536, P3KV_TRACE=folder,
        )  # fmt: skip
    return result, folder


def events(folder: Path, category: str) -> List[Dict[str, Any]]:
    """What worker 0 recorded in a category, times in microseconds."""
    found = read_trace(folder / "worker-0.json")
    return [event for event in found if event["cat"] == category]


def computing(run: Run, phase: str) -> List[Dict[str, Any]]:
    """Worker 0's emulated forward or backward operations, in order."""
    return [span for span in run.spans[0] if span["phase"] == phase]


def test_early_layers_overtake_queued_late_layers(run: Any) -> None:
    sends = events(run[1], "send")
    early = [e for e in sends if e["name"] == FIRST and e["args"]["round"] > 1]
    late = [e for e in sends if e["name"] == LAST and e["args"]["round"] > 1]
    overtakings = sum(
        e["ts"] > l["ts"] and e["ts"] + e["dur"] < l["ts"] + l["dur"]
        for l in late  # noqa: E741
        for e in early
    )
    assert overtakings > len(early), "slices queued later, for a layer needed earlier, left first"


def test_the_next_forward_pass_starts_before_the_last_update_arrives(run: Any) -> None:
    received = events(run[1], "receive")
    forwards = [span for span in computing(run[0], "forward") if span["layer"].endswith("dense0")]
    assert len(forwards) >= 7
    early_starts = 0
    for span in forwards[2:]:
        # Iteration i, counted from 0, needs the values of round i.
        last_us = max(
            e["ts"] for e in received
            if e["name"] == LAST and e["args"]["round"] == span["iteration"]
        )  # fmt: skip
        early_starts += span["start_ns"] / 1000 < last_us
    assert early_starts == len(forwards[2:])


def test_slices_are_sent_during_backward_and_during_forward(run: Any) -> None:
    ends_us = [e["ts"] + e["dur"] for e in events(run[1], "send") if e["args"]["round"] > 1]
    for phase in ("forward", "backward"):
        spans = [s for s in computing(run[0], phase) if s["iteration"] >= 2]
        for iteration in {s["iteration"] for s in spans} - {max(s["iteration"] for s in spans)}:
            inside = [
                end
                for end in ends_us
                for s in spans
                if s["iteration"] == iteration and s["start_ns"] <= end * 1000 <= s["end_ns"]
            ]
            assert inside, f"nothing was sent during the {phase} pass of iteration {iteration}"


def test_a_layer_waits_for_its_own_weights_only(run: Any) -> None:
    received = events(run[1], "receive")
    for span in computing(run[0], "forward"):
        if span["iteration"] < 2:
            continue
        key = str("012".index(span["layer"][-1]))
        arrived_us = [
            e["ts"] for e in received
            if e["name"] == key and e["args"]["round"] == span["iteration"]
        ]  # fmt: skip
        assert arrived_us, span
        assert max(arrived_us) <= span["start_ns"] / 1000
