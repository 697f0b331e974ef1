"""What a consistency rule can reach at most, and what recorded runs say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.campaign.records import Records
from experiments.drawing import by_consistency
from experiments.drawing.by_consistency import CASES, steps_taken
from experiments.emulation.emulator import factors
from tests.experiments.pictures import assert_is_picture

RESULTS = Path(by_consistency.__file__).parent.parent / "results"


@pytest.mark.parametrize("warm_up", [0, 2])
def test_stragglers_are_waited_for_by_as_much_as_the_staleness_says(warm_up: int) -> None:
    hosts, count, share = 4, 30, 0.2
    drawn = [list(factors(rank, share, warm_up + count))[warm_up:] for rank in range(hosts)]
    taken = [steps_taken(hosts, warm_up, count, share, staleness) for staleness in range(40)]
    assert taken == sorted(taken, reverse=True)
    if not warm_up:
        assert taken[0] == sum(map(max, zip(*drawn))), "each step waits for the slowest"
        assert taken[-1] == max(map(sum, drawn)), "nobody waits"
    assert {1.0, 2.0} == {one for its in drawn for one in its}


def test_recorded_rules_reach_what_the_documents_say_and_not_more_than_they_can(
    tmp_path: Path,
) -> None:
    records = Records(RESULTS / "consistency.json", {})
    table = by_consistency.summarize(records.runs)
    found = {row["system"]: row for row in table}
    assert len(table) == sum(len(case.iterations) for case in CASES.values())
    for row in table:
        assert row["efficiency"]["median"] <= row["bound"] + 0.005
        assert f"{row['efficiency']['median']:.3f}" in by_consistency.table_text(table)
    assert found["delayed_1"]["efficiency"]["median"] >= 0.92
    assert found["straggling_bounded_3"]["gain"] >= 1.2
    assert found["local_50"]["efficiency"]["median"] >= 0.9
    picture = tmp_path / "consistency.png"
    by_consistency.draw(table, []).savefig(picture)
    assert_is_picture(picture)
