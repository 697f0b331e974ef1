"""Parameters match by their names, or the job ends: no worker trains another's layer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.common.naming import NamePair, SameNames, both
from p3kv.errors import KeyMismatchError
from p3kv.wire.messages import DeclaredKey, DeclareKey, KeyRefused
from tests.jobs import JobResult, run_job
from tests.scheduled import aborted, running, to, worker

# Pure.


def refused(*pairs: Tuple[str, str]) -> List[Tuple[str, str]]:
    """The names that do not fit each other, when keys 0, 1, ... are called so."""
    names = SameNames()
    for key, pair in enumerate(pairs):
        found = names.contradiction(NamePair(key, *pair))
        if found:
            return [(one.one, one.other) for one in found]
    return []


@pytest.mark.parametrize(
    "pairs",
    [
        [("w", "w")],
        [("dense3_weight", "dense4_weight"), ("dense3_bias", "dense4_bias")],
        [("dense3_weight", "dense4_weight"), ("conv3_weight", "conv1_weight")],
        [("net0_dense0_w", "net1_dense0_w"), ("net0_dense1_w", "net1_dense1_w")],
        [("dense0_w", "dense1_w"), ("net0_dense0_w", "net0_dense0_w")],
        [("conv2_batchnorm3_gamma", "conv5_batchnorm4_gamma")],
        [("dense9_weight", "dense10_weight"), ("dense7_weight", "dense8_weight")],
        [("stage01_w", "stage02_w"), ("stage08_w", "stage09_w")],
    ],
)
def test_a_common_shift_of_each_counter_is_no_difference(pairs: List[Tuple[str, str]]) -> None:
    assert refused(*pairs) == []


@pytest.mark.parametrize(
    "pairs",
    [
        [("enc_weight", "foo_weight")],
        [("dense0_weight", "dense0_bias")],
        [("dense0_weight", "conv0_weight")],
        [("dense_weight", "dense0_weight")],
        [("dense10_weight", "dense8_weight"), ("dense9_weight", "dense9_weight")],
        [("dense0_weight", "dense0_weight"), ("dense1_weight", "dense2_weight")],
        [("net0_dense0_w", "net1_dense0_w"), ("net0_dense1_w", "net0_dense1_w")],
        [("stage01_w", "stage1_w")],
    ],
)
def test_any_other_difference_is_told_with_both_names(pairs: List[Tuple[str, str]]) -> None:
    assert refused(*pairs) == pairs


WORDS = st.sampled_from(["dense", "conv", "batchnorm", "resnetv1", "a0"])
LAYERS = st.lists(
    st.tuples(WORDS, st.integers(0, 25), st.sampled_from(["weight", "bias", "net0_conv1_w"])),
    min_size=1,
    max_size=12,
    unique=True,
)


@given(LAYERS, st.dictionaries(WORDS, st.integers(0, 120)), st.data())
def test_where_places_are_those_of_sorted_names_all_that_is_accepted_is_right(
    layers: List[Tuple[str, int, str]], made_before: Dict[str, int], data: st.DataObject
) -> None:
    """And what a script makes before is accepted unless it changes the order. Only numbers at the
    end of a word may be refused without need."""
    name = "{}{}_{}".format
    here = sorted(name(*layer) for layer in layers)
    there = {name(word, count + made_before.get(word, 0), end): name(word, count, end)
             for word, count, end in layers}  # fmt: skip
    matched = [there[other] for other in sorted(there)]
    accepted = refused(*zip(here, sorted(there))) == []
    assert not accepted or matched == here
    if not any(word[-1].isdigit() for word, _, _ in layers):
        assert accepted == (matched == here)
    elsewhere = data.draw(st.permutations(sorted(there)))
    if refused(*zip(here, elsewhere)) == []:
        assert [there[other] for other in elsewhere] == here


@given(st.text(max_size=30))
def test_every_name_is_its_own(name: str) -> None:
    assert refused((name, name)) == []
    assert refused((name, name + "x")) == [(name, name + "x")]


def test_both_sides_are_told_in_the_order_of_their_keys() -> None:
    pairs = [NamePair(0, "dense10_w", "dense8_w"), NamePair(1, "dense9_w", "dense9_w")]
    assert both(pairs, "worker 0", "worker 1") == (
        "worker 0 has 'dense10_w', 'dense9_w' where worker 1 has 'dense8_w', 'dense9_w' (keys 0, 1)"
    )


# The scheduler.

NAMES = {0: ["dense10_w", "dense9_w"], 1: ["dense10_w", "dense9_w"], 2: ["dense8_w", "dense9_w"]}


@given(st.permutations([(rank, key) for rank in range(3) for key in range(2)]))
def test_the_worker_whose_layers_are_swapped_is_found_in_whatever_order_keys_are_declared(
    order: List[Tuple[int, int]],
) -> None:
    job = running(workers=3)
    declared = set()
    for rank, key in order:
        declared.add((rank, key))
        name = NAMES[rank][key]
        replies = job.handle(worker(rank), DeclareKey(key, (2,), "float32", name))
        if {(0, 0), (0, 1), (2, 0), (2, 1)} <= declared:
            assert isinstance(to(replies, worker(rank))[0], KeyRefused)
            failure = aborted(replies, "disagree on the parameters", KeyMismatchError)
            for words in ("worker 0 has 'dense", "worker 2 has 'dense", "'dense8_w'"):
                assert words in failure.reason
            return
        ((_, answer),) = replies
        assert isinstance(answer, DeclaredKey)


def test_a_shift_is_told_once_and_names_that_nobody_knows_are_not_compared() -> None:
    job = running(workers=3)
    for key in range(2):
        for rank in range(3):
            declared = DeclareKey(
                key, (2,), "float32", f"dense{key + 2 * rank}_w" if rank else None
            )
            job.handle(worker(rank), declared)
    assert job.shifted_names() is None
    for key in range(2, 4):
        for rank in range(3):
            job.handle(worker(rank), DeclareKey(key, (2,), "float32", f"dense{key + rank}_w"))
    assert "worker 0 has 'dense2_w' where worker 1 has 'dense3_w'" in (job.shifted_names() or "")
    assert job.shifted_names() is None
    assert job.failure is None


def test_each_store_s_names_have_a_shift_of_their_own() -> None:
    job = running()
    for store, names in enumerate([("dense0_w", "dense1_w"), ("dense1_w", "dense0_w")]):
        for rank, name in enumerate(names):
            job.handle(worker(rank), DeclareKey(0, (2,), "float32", name, store=store))
    assert job.failure is None


# Real processes.


def trained(how: str) -> JobResult:
    return run_job("names.py", [how], workers=2)


@pytest.mark.parametrize(
    ("how", "one", "other"),
    [
        ("swapped", "'dense10_weight', 'dense9_weight'", "'dense8_weight', 'dense9_weight'"),
        ("different", "'dec_weight'", "'bar_weight'"),
        ("sparse", "'enc_weight'", "'foo_weight'"),
    ],
)
def test_workers_whose_names_do_not_match_all_learn_which(how: str, one: str, other: str) -> None:
    result = trained(how)
    assert result.code == 1
    for part in ("worker 0", "worker 1", "server 0", "scheduler"):
        assert f"worker 0 has {one} where worker 1 has {other} (key" in result.said_by(part), part
    assert "give the network a prefix" in result.output


@pytest.mark.parametrize("how", ["shifted", "listed"])
def test_layers_that_are_counted_otherwise_are_trained_as_they_are_and_told_of(how: str) -> None:
    result = trained(how)
    assert result.code == 0, result.output
    for rank in range(2):
        assert "all is right" in result.said_by(f"worker {rank}")
    assert result.said_by("scheduler").count("Nothing is wrong as long as") == 1, result.output


def trained_with_checkpoints(folder: Path, *arguments: object, resume: int) -> JobResult:
    return run_job(
        "renamed.py", arguments, workers=2, P3KV_CHECKPOINT_DIR=folder, P3KV_CHECKPOINT_EVERY=1,
        P3KV_RESUME=resume,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of layers that are counted from 8 on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    result = trained_with_checkpoints(folder, 8, "", "", resume=0)
    assert result.code == 0, result.output
    return folder


@pytest.mark.parametrize(
    ("arguments", "theirs", "ours"),
    [
        ((0, "enc_", "dec_"), "'dense8_weight'", "'dec_weight'"),
        ((9, "", ""), "'dense8_weight', 'dense9_weight'", "'dense10_weight', 'dense9_weight'"),
    ],
    ids=["others", "swapped"],
)
def test_a_job_does_not_go_on_with_the_values_of_other_parameters(
    written: Path, arguments: Tuple, theirs: str, ours: str
) -> None:
    result = trained_with_checkpoints(written, *arguments, resume=1)
    assert result.code == 1
    says = f"is of other parameters: it has {theirs} where this script has {ours} (key"
    for part in ("worker 0", "worker 1", "server 0", "scheduler"):
        assert says in result.said_by(part), result.output


def test_a_script_that_makes_more_before_goes_on_and_is_told(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "copy")
    result = trained_with_checkpoints(tmp_path / "copy", 2, "", "", resume=1)
    assert result.code == 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        assert "all is right after 3 steps and 3 more" in said, result.output
    said = result.said_by("worker 0")
    assert "step 3 has 'dense8_weight' where this script has 'dense2_weight'" in said
    assert said.count("Nothing is wrong as long as") == 1
