"""What can't be combined is refused, or said in the log, with the reason and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from string import Formatter
from typing import Any, Dict, Tuple

import pytest

from p3kv.common.combinations import TABLE, Combination, Feature
from p3kv.common.words import Words
from p3kv.frontends.mxnet.front_end import MXNet
from p3kv.frontends.torch.front_end import Torch
from p3kv.scheduler.agreement import sums_on_hosts
from p3kv.wire.messages import JobSettings
from tests.jobs import SUMS_ONLY, run_job
from tests.whole_jobs.test_host_sums import run_on_hosts

PLUGINS = {
    "P3KV_PLUGINS": "own_changed,own_consistency,own_fourth,own_prediction,once",
}
JOBS: Dict[str, Dict[str, Any]] = {
    "plain": {"servers": 2, "P3KV_SLICE_SIZE": 100},
    "checkpoints": {"P3KV_CHECKPOINT_DIR": "", **SUMS_ONLY},
    "seldom": {"P3KV_CONSISTENCY": "every_fourth", **SUMS_ONLY},
    "seldom_and_checkpoints": {
        "P3KV_CONSISTENCY": "every_fourth", "P3KV_CHECKPOINT_DIR": "", **SUMS_ONLY,
    },
    "at_once": {"MXNET_ENGINE_TYPE": "NaiveEngine", "P3KV_VALUE_CODEC": "changed", **SUMS_ONLY},
    "ahead": {"P3KV_CONSISTENCY": "one_behind"},
    "predicts": {"P3KV_CONSISTENCY": "predicts_two"},
    "local": {"P3KV_CONSISTENCY": "local:steps=2"},
    "on_hosts": {
        "P3KV_CONSISTENCY": "one_behind", "P3KV_CHECK_FINITE": 1, "P3KV_LET_WORKERS_LEAVE": 1,
        **SUMS_ONLY,
    },
}  # fmt: skip
"""Jobs of `workers/combinations.py`, with their settings. Each writes checkpoints into a folder of
its own."""


def names(entry: Combination) -> str:
    return f"{entry.one.name} {entry.other.name}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Dict[str, Any], str]:
    """How each combination was refused, and what all jobs have said."""
    refusals, said = {}, ""
    for job, settings in JOBS.items():
        folder = tmp_path_factory.mktemp(job)
        file = folder / "refusals.json"
        more = {**PLUGINS, **settings}
        if "P3KV_CHECKPOINT_DIR" in more:
            more["P3KV_CHECKPOINT_DIR"] = folder
        if job == "on_hosts":
            result = run_on_hosts(2, "combinations.py", job, file, workers=2, **more)
        else:
            result = run_job("combinations.py", [job, file], **more)
        # Where no store can be made, the job ends.
        has_no_store = job == "seldom_and_checkpoints"
        assert result.code == has_no_store, result.output
        refusals.update(json.loads(file.read_text()))
        said += result.output
    return refusals, said


OF_TORCH = {Feature.DROPPING, Feature.WEIGHTS}
"""Only p3kv.torch has them; `tests/workers/torch_combinations.py` is refused them."""
IN_MXNET = [entry for entry in TABLE if not {entry.one, entry.other} & OF_TORCH]


@pytest.mark.parametrize("entry", IN_MXNET, ids=names)
def test_each_combination_is_refused_or_told_in_the_log(
    seen: Tuple[Dict[str, Any], str], entry: Combination
) -> None:
    refusals, said = seen
    if entry.error is None:
        line = f": {entry.in_words}: {entry.sentences}\n"
        assert 1 <= said.count(line) <= 4, said
    else:
        kind, message = refusals[names(entry)]
        assert kind == entry.error.__name__
        assert message.endswith(f": {entry.sentences}")


def test_nothing_is_refused_that_is_not_in_the_table(seen: Tuple[Dict[str, Any], str]) -> None:
    assert seen[0].keys() == {names(entry) for entry in IN_MXNET if entry.error is not None}


@pytest.mark.parametrize("spoken", [MXNet.words, Torch.words], ids=["mxnet", "torch"])
def test_advice_is_whole_in_the_words_of_each_front_end(spoken: Words) -> None:
    only_mxnet = {
        "set_optimizer", "workers_update", "declare_key", "clip_on_workers", "later_engine",
    }  # fmt: skip
    for entry in TABLE:
        needed = {name for _, name, _, _ in Formatter().parse(entry.instead) if name}
        if spoken is MXNet.words or not needed & only_mxnet:
            assert all(asdict(spoken)[name] for name in needed), entry


@pytest.mark.parametrize(
    ("setting", "sums"),
    [
        ({}, True),
        ({"deterministic": True}, True),
        ({"local_aggregation": False}, False),
        ({"check_finite": True}, True),
        ({"let_workers_leave": True}, True),
        ({"consistency": "local:steps=7"}, True),
        ({"consistency": "bounded:staleness=3,lazy=1"}, True),
        ({"consistency": "bounded:staleness=3"}, False),
        ({"consistency": "delayed"}, False),
        ({"consistency": "nobody_knows"}, False),
    ],
)
def test_workers_of_a_host_sum_unless_a_setting_leaves_it_out(
    setting: Dict[str, Any], sums: bool
) -> None:
    assert sums_on_hosts(JobSettings(**setting), 2) == sums
