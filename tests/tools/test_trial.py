"""What the processes of a comparison are told, and report."""

from __future__ import annotations

import pytest

from p3kv import config
from p3kv.config.trials import FIFO, NATIVE, P3KV, Report, Trial, TrialReports, tell
from p3kv.errors import ConfigError


def test_reports_are_found_among_other_lines(capfd: pytest.CaptureFixture[str]) -> None:
    report = Report(tuple(number / 7 for number in range(2000)), notes=("ä | \n",))
    tell(report)
    reports = TrialReports()
    lines = capfd.readouterr().err.split("\n")
    assert len(lines) > 10 and max(map(len, lines)) < 4000
    taken = [(reports.take("worker 1", line), reports.take("worker 0", "of worker 0"))
             for line in lines]  # fmt: skip
    assert taken.count((True, False)) == len([line for line in lines if line])
    assert reports.newest == {"worker 1": report}


def test_a_trial_travels_as_a_variable() -> None:
    for trial in (
        Trial(NATIVE, 3, 10),
        Trial(P3KV, 3, 10, "torch", ("topk:share=0.01", "identity")),
    ):
        assert Trial.parsed("X", str(trial)) == trial and trial.last_step == 14
    for wrong in ("", "native", "other 1 2", "native a b"):
        with pytest.raises(ConfigError, match="only 'p3kv compare' and 'p3kv tune' set it"):
            Trial.parsed("X", wrong)


def test_a_trial_writes_nothing_and_chooses_the_priorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("P3KV_CHECKPOINT_DIR", "folder")
    monkeypatch.setenv("P3KV_TRACE", "folder")
    monkeypatch.setenv("P3KV_RESUME", "1")
    for store in (P3KV, FIFO):
        monkeypatch.setenv("P3KV_TRIAL", str(Trial(store, 1, 1)))
        settings = config.current()
        assert (settings.checkpoint_dir, settings.trace, settings.resume) == (None, None, False)
        assert settings.priorities == (store == P3KV)
    assert not config.unknown_variables()
