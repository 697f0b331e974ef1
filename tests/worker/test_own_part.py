"""Which parts of checkpoints a worker writes, whatever it hears when."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from p3kv.checkpoints import Place
from p3kv.wire.messages import UNKNOWN, Checkpoint, Written
from p3kv.worker.job import JobMember
from p3kv.worker.saving.cuts import Cut
from p3kv.worker.saving.own_part import OwnPart


@pytest.mark.parametrize("is_late", [False, True])
def test_what_was_asked_for_is_written_though_later_ones_are_left_out(
    tmp_path: Path, is_late: bool
) -> None:
    """Also where the worker reaches it only then; and nothing is kept of the others."""
    written: List[Written] = []
    place = Place(1, "here", ["here"], ["here", "here"], str.encode)
    job = JobMember()
    own = OwnPart(place, str(tmp_path), {}, job, written.append)
    own.has_part = True
    steps = [lambda: own.leave_out(6), *(lambda step=step: own.copy(_cut(step)) for step in (2, 4))]
    own.write(Checkpoint(2, "identity", UNKNOWN, [], "here", ["here"]))
    for step in steps if is_late else steps[1:] + steps[:1]:
        step()
    own.close()
    while job.loop._inbox:
        function, arguments = job.loop._inbox.popleft()
        function(*arguments)
    assert written == [Written(2, "")]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000002.worker-1-of-2.npz"]
    own.leave_out(6)
    own.copy(_cut(6))
    assert not own.is_needed


def _cut(step: int) -> Cut:
    return Cut(step, step, [])
