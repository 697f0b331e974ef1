"""The traces of a job, put together: on one clock, in order, and as other programs read them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.common.tracing import (
    APPLIED,
    FORWARD_BEGIN,
    FORWARD_END,
    READY,
    RECEIVE,
    SEND,
    SUM,
    UNKNOWN,
    UPDATE,
    ClockSample,
    Process,
    Span,
    read_trace,
)
from p3kv.tools.cli import main
from p3kv.tools.timeline import (
    Timeline,
    Traced,
    aligned,
    iterations,
    pairs,
    passes,
    read_job,
    typical,
    uncertainty_ns,
)
from p3kv.wire.messages import TimeTold
from p3kv.wire.tracing import sample_of
from tests.jobs import DEADLINE_S, run_job

AHEAD_S = 1000
STEPS = 6
MS = 1_000_000


def _shifted_clocks() -> bool:
    """Whether this machine gives a process a clock of its own, to this user."""
    command = ["unshare", "--time", "--monotonic", str(AHEAD_S), sys.executable, "-c"]
    try:
        shown = subprocess.run(
            [*command, "import time; print(time.monotonic())"],
            capture_output=True,
            timeout=DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.returncode == 0 and float(shown.stdout) > time.monotonic() + AHEAD_S / 2


@pytest.fixture(scope="module")
def ahead_s() -> int:
    """By how much worker 1's clock is ahead."""
    return AHEAD_S if _shifted_clocks() else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ahead_s: int) -> Path:
    """The traces of a job with 2 workers and 2 servers."""
    traces = tmp_path_factory.mktemp("job") / "traces"
    result = run_job("traced.py", [ahead_s], 2, 2, P3KV_TRACE=traces, P3KV_SLICE_SIZE=10_000)
    assert result.code == 0, result.output
    return traces


@pytest.fixture(scope="module")
def timeline(folder: Path) -> Timeline:
    return read_job(folder)


# What is recorded.


def test_all_kinds_of_work_are_recorded_with_names_bytes_and_steps(timeline: Timeline) -> None:
    assert [one.process.name for one in timeline.processes] == [
        "worker 0", "worker 1", "server 0", "server 1"
    ]  # fmt: skip
    names = {timeline.name(key_id) for key_id in timeline.keys}
    assert {"words_weight", "layer0_weight", "layer2_bias"} <= names
    for one in timeline.processes:
        kinds = {span.kind for span in one.spans}
        if one.role == "worker":
            assert kinds == {FORWARD_BEGIN, FORWARD_END, READY, SEND, RECEIVE, APPLIED}
        else:
            assert kinds == {RECEIVE, SUM, UPDATE, SEND}
        for span in one.spans:
            assert span.since_ns <= span.start_ns <= span.end_ns
            if span.kind in (SEND, RECEIVE):
                assert span.peer in (0, 1)
        steps = {span.step for span in one.spans if span.kind == SEND and span.round > 0}
        assert steps - {UNKNOWN} == set(range(1, STEPS + 1))
    for worker in timeline.of_role("worker"):
        sent_bytes = sum(
            span.size_bytes for span in worker.spans if span.kind == SEND and span.step == 3
        )
        dense = sum(k.size_bytes for k in timeline.keys.values() if k.name != "words_weight")
        rows = 16 * (16 * 4 + 4)  # of 16 elements each, with their numbers
        assert sent_bytes == pytest.approx(dense + rows, abs=100)


def test_whatever_is_sent_arrives(timeline: Timeline) -> None:
    sent = sum(span.kind == SEND for one in timeline.processes for span in one.spans)
    received = sum(span.kind == RECEIVE for one in timeline.processes for span in one.spans)
    found = list(pairs(timeline))
    assert len(found) == sent == received > 100
    for pair in found:
        assert pair.sent.size_bytes == pair.received.size_bytes
        assert (pair.sent.peer, pair.received.peer) == (pair.receiver.rank, pair.sender.rank)


# Clocks.


def test_no_slice_arrives_before_it_leaves_whatever_its_process_s_clock(
    timeline: Timeline, folder: Path, ahead_s: int
) -> None:
    for pair in pairs(timeline):
        wrong_ns = pair.sender.uncertainty_ns + pair.receiver.uncertainty_ns
        assert pair.received.end_ns >= pair.sent.start_ns - wrong_ns
    offsets = [read_trace(path).clock for path in sorted(folder.glob("worker-*"))]
    for samples, expected_s in zip(offsets, (0, ahead_s)):
        assert samples
        for sample in samples:
            assert abs(sample.offset_ns + expected_s * 10**9) <= sample.round_trip_ns / 2 + 1
    if not ahead_s:
        pytest.skip("shown with one clock only: 'unshare --time' gives no other one here")


def test_what_a_slice_goes_through_comes_in_order(timeline: Timeline) -> None:
    updates = {
        (s.key_id, s.slice, s.round): s
        for one in timeline.of_role("server") for s in one.spans if s.kind == UPDATE
    }  # fmt: skip
    checked = 0
    for pair in pairs(timeline):
        update = updates.get((pair.sent.key_id, pair.sent.slice, pair.sent.round))
        if update is None:
            continue
        wrong_ns = pair.sender.uncertainty_ns + pair.receiver.uncertainty_ns
        checked += 1
        if pair.sender.role == "worker":
            assert pair.sent.start_ns - wrong_ns <= update.end_ns
            assert pair.received.end_ns <= update.end_ns
        else:
            assert pair.sent.since_ns >= update.end_ns
            assert pair.received.end_ns >= update.end_ns - wrong_ns
    assert checked > 50


@given(
    offset_s=st.floats(1, 1e6) | st.floats(-1e6, -1),
    drift=st.floats(-1e-4, 1e-4),
    delays=st.lists(
        st.tuples(st.integers(10_000, 40 * MS), st.integers(10_000, 40 * MS)),
        min_size=1, max_size=60,
    ),
)  # fmt: skip
def test_aligned_times_are_as_right_as_they_say(
    offset_s: float, drift: float, delays: List[Tuple[int, int]]
) -> None:
    """Samples every 2 s: how long the question and the answer took, of a scheduler whose clock is
    `offset_s` ahead and drifts."""
    begin_ns = 2 * 10**15

    def schedulers(own_ns: int) -> int:
        return own_ns + int(offset_s * 1e9 + drift * (own_ns - begin_ns))

    samples = []
    for number, (there, back) in enumerate(delays):
        asked = begin_ns + number * 2 * 10**9
        arrived = schedulers(asked + there)
        samples.append(sample_of(TimeTold(asked, arrived, arrived), asked + there + back))
    times = np.array([begin_ns + second * 10**9 for second in range(2 * len(delays))])
    # Before the first sample that counts, and after the last, the clocks may drift apart.
    allowed = uncertainty_ns(samples) + abs(drift) * (times[-1] - times[0]) + 1000
    for own, shifted in zip(times.tolist(), aligned(times, samples).tolist()):
        assert abs(shifted - schedulers(own)) <= allowed


def test_processes_of_one_machine_have_one_clock() -> None:
    times = np.array([5, 10**12])
    samples = [ClockSample(10**9 * n, -300 * n, 1000 * n) for n in range(5)]
    assert aligned(times, samples) is times
    assert uncertainty_ns(samples) == 0


# Passes and iterations.


def _worker(*spans: Span) -> Traced:
    return Traced("worker", 0, Process("worker 0", "host", 1), list(spans), 0, True)


def _span(kind: str, key_id: int, start_ms: float, end_ms: float, step: int) -> Span:
    start, end = int(start_ms * MS), int(end_ms * MS)
    return Span(kind, key_id, start, start, end, 0, step, step, 0, -key_id)


def _step(step: int, begin_ms: float) -> List[Span]:
    """Backward takes 2 and 1 ms. Slices pass for 4 ms, the last of them alone; the forward pass
    begins when the first layer, key 0, has its value, and takes 3 ms."""
    return [
        _span(FORWARD_END, UNKNOWN, begin_ms, begin_ms, UNKNOWN),
        _span(READY, 1, begin_ms + 2, begin_ms + 2, step),
        _span(READY, 0, begin_ms + 3, begin_ms + 3, step),
        _span(SEND, 1, begin_ms + 2, begin_ms + 4, step),
        _span(SEND, 0, begin_ms + 3, begin_ms + 4, step),
        _span(RECEIVE, 0, begin_ms + 4, begin_ms + 5, step),
        _span(APPLIED, 0, begin_ms + 5, begin_ms + 5, step),
        _span(RECEIVE, 1, begin_ms + 5, begin_ms + 6, step),
        _span(APPLIED, 1, begin_ms + 6, begin_ms + 6, step),
    ]


def test_passes_are_found_from_when_gradients_were_ready() -> None:
    found = passes(_worker(*_step(1, 10), *_step(2, 18)))
    shown = [(one.phase, one.key_id, one.step, one.start_ns // MS, one.end_ns // MS)
             for one in found]  # fmt: skip
    assert shown == [
        ("backward", 1, 1, 10, 12),
        ("backward", 0, 1, 12, 13),
        ("forward", UNKNOWN, 2, 15, 18),
        ("backward", 1, 2, 18, 20),
        ("backward", 0, 2, 20, 21),
    ]


def test_an_iteration_s_numbers_are_of_what_overlaps() -> None:
    worker = _worker(*_step(1, 10), *_step(2, 18), *_step(3, 26))
    found = iterations(Timeline([worker], {}), worker)
    assert [one.step for one in found] == [1, 2]
    first = found[0]
    assert first.seconds == pytest.approx(8e-3)
    # Slices pass from 12 to 16; the worker computes until 13 and from 15 on.
    assert first.overlap == pytest.approx(2 / 4)
    assert first.compute_idle == pytest.approx(2 / 8)
    assert first.link_idle == pytest.approx(4 / 8)
    assert typical(found) == first
    assert typical([]) is None


def test_without_a_forward_s_end_the_first_gradient_takes_no_time() -> None:
    spans = [span for span in [*_step(1, 10), *_step(2, 18)] if span.kind != FORWARD_END]
    worker = _worker(*spans)
    found = passes(worker)
    assert [(one.phase, (one.end_ns - one.start_ns) // MS) for one in found] == [
        ("backward", 0), ("backward", 1), ("backward", 0), ("backward", 1)
    ]  # fmt: skip
    (iteration,) = iterations(Timeline([worker], {}), worker)
    assert iteration.seconds == pytest.approx(8e-3)
    assert iteration.overlap is None and iteration.compute_idle is None
    assert iteration.link_idle == pytest.approx(4 / 8)


def test_slices_that_stay_on_a_host_do_not_pass_its_link() -> None:
    def one(role: str, rank: int, host: str) -> Traced:
        return Traced(role, rank, Process(f"{role} {rank}", host, 1), [], 0, True)

    here, other = one("worker", 0, "a"), one("server", 1, "b")
    alone = Timeline([here, one("server", 0, "a")], {})
    spread = Timeline([here, one("server", 0, "a"), other], {})
    span = Span(SEND, 0, 0, 0, 1, peer=0)
    assert not alone.is_local(here, span)
    assert spread.is_local(here, span)
    assert not spread.is_local(here, span._replace(peer=1))


# What `p3kv trace` makes.


@pytest.fixture(scope="module")
def made(folder: Path) -> Dict[str, Any]:
    """The file for Perfetto, as read, after `p3kv trace` was called."""
    assert main(["trace", str(folder)]) == 0
    whole: Dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return whole


def test_processes_and_tracks_have_names(made: Dict[str, Any]) -> None:
    named: Dict[str, List[str]] = defaultdict(list)
    for event in made["traceEvents"]:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            named[event["name"]].append(event["args"]["name"])
    assert named["process_name"] == [
        f"{name} (127.0.0.1)" for name in ("worker 0", "worker 1", "server 0", "server 1")
    ]
    assert {"compute", "send to server 1", "receive from worker 0", "sum", "update"} <= set(
        named["thread_name"]
    )
    names = {event["name"] for event in made["traceEvents"] if event["ph"] == "X"}
    assert {"forward", "layer1_weight", "words_weight"} <= names


def test_events_nest_in_each_track(made: Dict[str, Any]) -> None:
    """As the trace event format wants of complete events: no two overlap without one inside the
    other."""
    tracks: Dict[Tuple[int, int], List[Tuple[int, int]]] = defaultdict(list)
    for event in made["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            assert start >= 0 and event["dur"] >= 0
            track = tracks[event["pid"], event["tid"]]
            track.append((start, start + round(event["dur"] * 1000)))
    # A worker has 5 (compute, two each of send and receive), a server 6.
    assert len(tracks) == len({track for _, track in tracks}) == 2 * 5 + 2 * 6
    for track in tracks.values():
        around: List[int] = []
        for start, end in sorted(track, key=lambda event: (event[0], -event[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def test_arrows_lead_from_a_slice_s_send_to_its_receive(
    made: Dict[str, Any], timeline: Timeline
) -> None:
    lasting = {
        (event["pid"], event["tid"], event["ts"]): event
        for event in made["traceEvents"] if event["ph"] == "X"
    }  # fmt: skip
    arrows: Dict[int, Dict[str, Any]] = defaultdict(dict)
    for event in made["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = lasting[event["pid"], event["tid"], event["ts"]]
    assert len(arrows) == len(list(pairs(timeline)))
    for arrow in arrows.values():
        assert (arrow["s"]["cat"], arrow["f"]["cat"]) == (SEND, RECEIVE)
        assert arrow["s"]["name"] == arrow["f"]["name"]


def test_what_waits_in_queues_is_counted_and_ends_with_nothing(made: Dict[str, Any]) -> None:
    last: Dict[int, int] = {}
    for event in made["traceEvents"]:
        if event["ph"] == "C":
            last[event["pid"]] = event["args"]["bytes"]
            assert last[event["pid"]] >= 0
    assert last == dict.fromkeys((1, 2, 3, 4), 0)


def test_a_picture_shows_an_iteration_and_the_numbers_are_printed(
    made: Dict[str, Any], folder: Path, ahead_s: int, capsys: pytest.CaptureFixture
) -> None:
    assert main(["trace", str(folder)]) == 0
    said = capsys.readouterr().out
    pixels = plt.imread(folder / "trace.png")
    assert pixels.min() < pixels.max() and pixels.shape[1] > 1000
    clocks = "their clocks are aligned within" if ahead_s else "on one clock"
    assert f"2 workers and 2 servers; {clocks}" in said
    for rank in (0, 1):
        (line,) = [line for line in said.splitlines() if line.startswith(f"worker {rank}")]
        milliseconds, *shares = line.split()[2:]
        assert float(milliseconds) > 0
        assert all(0 <= float(share.rstrip("%")) <= 100 for share in shares)


def test_without_matplotlib_all_but_the_picture_is_made(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "p3kv.tools.pictures", raising=False)
    assert main(["trace", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "pip install 'p3kv[plots]'" in said and "overlap" in said


def test_a_folder_without_traces_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "Set P3KV_TRACE to a folder" in capsys.readouterr().err
