"""A trace is there however its process ends, and what goes wrong with it harms nobody."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Iterator, List

import pytest

from p3kv.common import tracing
from p3kv.common.tracing import (
    SEND,
    ClockSample,
    KeyName,
    Process,
    Span,
    Tracer,
    read_trace,
)
from p3kv.errors import TraceError
from tests.jobs import SUMS_ONLY, TrainingJob, eventually, run_job

ENDS_S = 60.0
TOGETHER = tracing._SPANS_TOGETHER


class Warnings(logging.Handler):
    """What was warned of."""

    def __init__(self) -> None:
        super().__init__()
        self.said: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[List[str]]:
    handler = Warnings()
    logger = logging.getLogger("p3kv.common.tracing")
    logger.addHandler(handler)
    yield handler.said
    logger.removeHandler(handler)


def record(tracer: Tracer, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        tracer.span(Span(SEND, 5, number, number + 1, number + 2, slice=number))


def slices(path: Path) -> List[int]:
    return [span.slice for span in read_trace(path).spans]


def test_records_are_read_as_they_were_made(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path / "new" / "folder"), "worker 3", "10.0.0.1")
    name = KeyName(5, "k", 'dense0\n"weight"', 4096)
    span = Span(SEND, 5, 4_000, 5_000, 7_500, 1, 2, 3, 4, -2, 100)
    sample = ClockSample(1, -(10**15), 3)
    tracer.name_key(name)
    tracer.span(span)
    tracer.clock(sample)
    tracer.close()
    tracer.close()
    trace = read_trace(tmp_path / "new" / "folder" / "worker-3.jsonl")
    assert trace == (Process("worker 3", "10.0.0.1", os.getpid()), [span], {5: name}, [sample])


def test_a_trace_without_spans_is_one(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "server 0")
    for _ in range(2):
        trace = read_trace(tmp_path / "server-0.jsonl")
        assert trace.process.name == "server 0" and not trace.spans
        tracer.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no line"),
        ("[1]\n", "line 1 is"),
        ('["process","worker 0","h",1,99]\n', "line 1 is"),
        ('["process","worker 0","h",1,1]\n{"ph":"X"}\n', "line 2 is"),
        ('["process","worker 0","h",1,1]\n["send",1]\n', "line 2 is"),
    ],
    ids=["empty", "no process", "another format", "an object", "a span without times"],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "worker-0.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        read_trace(path)


def test_nothing_is_written_without_a_folder(tmp_path: Path) -> None:
    tracer = Tracer(None, "worker 0")
    record(tracer, 3 * TOGETHER)
    tracer.close()
    assert not tracer.enabled and not tracer._records


def test_what_was_recorded_is_there_before_the_end_and_little_is_in_memory(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "worker 0")
    record(tracer, 10 * TOGETHER + 7)
    path = tmp_path / "worker-0.jsonl"
    assert slices(path) == list(range(10 * TOGETHER))
    assert len(tracer._records) == 7
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(path.read_bytes()[:-20])
    assert slices(cut) == list(range(10 * TOGETHER - 1))
    tracer.close()
    assert slices(path) == list(range(10 * TOGETHER + 7))


def test_threads_record_together_and_nothing_is_lost(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "worker 0")
    threads = [
        threading.Thread(target=record, args=(tracer, 3 * TOGETHER, first * 10 * TOGETHER))
        for first in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    expected = [first * 10 * TOGETHER + n for first in range(4) for n in range(3 * TOGETHER)]
    assert sorted(slices(tmp_path / "worker-0.jsonl")) == expected


def test_a_file_has_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: List[str]
) -> None:
    monkeypatch.setattr(tracing, "MAX_TRACE_BYTES", 1 << 18)
    recording = Tracer(str(tmp_path), "worker 0")
    record(recording, 50 * TOGETHER)
    recording.close()
    path = tmp_path / "worker-0.jsonl"
    assert (1 << 17) < path.stat().st_size <= 1 << 18
    assert len(slices(path)) % TOGETHER == 0
    assert not recording.enabled and not recording._records
    assert len(warnings) == 1 and "gets no more" in warnings[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_a_full_disk_ends_the_trace_with_one_warning(tmp_path: Path, warnings: List[str]) -> None:
    (tmp_path / "worker-0.jsonl").symlink_to("/dev/full")
    tracer = Tracer(str(tmp_path), "worker 0")
    record(tracer, 3 * TOGETHER)
    tracer.close()
    assert not tracer.enabled
    assert len(warnings) == 1 and "No space left on device" in warnings[0]


def test_a_forked_child_leaves_its_parent_s_trace_alone(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "worker 0")
    record(tracer, 5)
    child = os.fork()
    if child == 0:
        tracer.close()
        os._exit(0)
    os.waitpid(child, 0)
    tracer.close()
    assert slices(tmp_path / "worker-0.jsonl") == list(range(5))


# In whole jobs.


def test_a_folder_that_can_t_be_made_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_job("join.py", P3KV_TRACE=tmp_path / "file" / "trace", **SUMS_ONLY)
    assert result.code == 0, result.output
    for name in ("worker 0", "server 0"):
        assert result.said_by(name).count("can't be written: Not a directory") == 1, result.output


def test_a_trace_with_no_room_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with TrainingJob(tmp_path, workers=1, P3KV_TRACE=folder, **SUMS_ONLY) as job:
        job.wait_until_training()
        for part in job.parts().values():
            part.rlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        eventually(lambda: job.output().count("can't be written: File too large") == 2)
        job.stop()
        result = job.result(ENDS_S)
    assert result.code == 0, result.output
    assert "all weights are right" in result.output
    for path in folder.iterdir():
        assert read_trace(path).spans


def test_a_trace_is_there_after_the_processes_were_killed_or_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with TrainingJob(tmp_path, workers=1, P3KV_TRACE=folder) as job:
        job.wait_until_training()
        paths = [folder / "worker-0.jsonl", folder / "server-0.jsonl"]
        eventually(lambda: all(path.stat().st_size > 1000 for path in paths))
        parts = job.parts()
        parts["worker 0"].kill()
        parts["server 0"].send_signal(signal.SIGINT)
        parts["server 0"].wait(ENDS_S)
    assert set(folder.iterdir()) == set(paths)
    assert all(read_trace(path).spans for path in paths)
