"""Where tensors are kept: every element on one server, by a rule that users choose and extend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Type

import pytest
from hypothesis import given
from hypothesis import strategies as st

from own_layout import WholeRows
from own_placement import BiasesLast
from p3kv.errors import ConfigError
from p3kv.scheduler.job import Job
from p3kv.slicing import (
    PLACEMENTS,
    Layout,
    Placement,
    Run,
    Topology,
    balanced_runs,
    checked,
    loads_with,
)
from p3kv.slicing.placement import Balanced
from p3kv.slicing.slices import Dense
from p3kv.wire.messages import DeclaredKey, DeclareKey, JobSettings, Ready
from tests.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SUMS_ONLY,
    held_port,
    output_of,
    run_job,
    start_role,
)
from tests.scheduled import NAME, SLICE_SIZE, aborted, assembled, hello, server, worker

sys.path.insert(0, str(SCRIPTS))
import exact_model

MEMBERS = ("balanced", "by_link", "round_robin", "whole_tensors")

layouts = st.lists(
    st.builds(Dense, st.tuples(st.integers(0, 3000)))
    | st.builds(WholeRows, st.tuples(st.integers(0, 50), st.integers(0, 90))),
    max_size=12,
)
slice_sizes = st.integers(1, 700)
servers = st.integers(1, 6)
names = st.sampled_from([*MEMBERS, "biases_last"])


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> object:
    """`PLACEMENTS.register`, whose effect ends with the test."""
    monkeypatch.setattr(PLACEMENTS, "_members", dict(PLACEMENTS._members))
    return PLACEMENTS.register


def placed(name: str, of: Sequence[Layout], slice_size: int, num_servers: int) -> List[List[Run]]:
    """The runs of tensors that come one after the other."""
    chosen, loads, found = PLACEMENTS.find(name)(), [0] * num_servers, []
    topology = Topology(("10.0.0.7",) * num_servers, ("10.0.0.7",))
    for layout in of:
        full = layout.full_slice_elems(slice_size)
        found.append(chosen.place(layout, full, loads, topology))
        loads = loads_with(loads, found[-1])
    return found


# The members.


@given(names, layouts, slice_sizes, servers, slice_sizes)
def test_runs_have_every_element_once_and_a_server_has_one_run_at_most(
    name: str, of: List[Layout], slice_size: int, num_servers: int, later_size: int
) -> None:
    for layout, runs in zip(of, placed(name, of, slice_size, num_servers)):
        assert checked(runs, layout, num_servers) == runs
        assert all(length % layout.grain_elems == 0 for _, length in runs)
        elements = [
            element
            for piece in layout.slices(runs, later_size)
            for element in range(piece.offset, piece.offset + piece.length)
        ]
        assert sorted(elements) == list(range(layout.size_elems))


@given(layouts, slice_sizes, servers)
def test_balanced_is_the_default_and_fills_the_emptiest_server(
    of: List[Layout], slice_size: int, num_servers: int
) -> None:
    loads, longest = [0] * num_servers, 0
    for layout, runs in zip(of, placed(JobSettings().placement, of, slice_size, num_servers)):
        full = layout.full_slice_elems(slice_size)
        grain = layout.grain_elems
        assert runs == balanced_runs(layout.size_elems, full, loads, grain_elems=grain)
        loads, longest = loads_with(loads, runs), max(longest, full)
        assert max(loads) - min(loads) <= longest


@given(layouts, slice_sizes, servers)
def test_round_robin_gives_slices_to_servers_in_turn_from_key_to_key(
    of: List[Layout], slice_size: int, num_servers: int
) -> None:
    turns = []
    for layout, runs in zip(of, placed("round_robin", of, slice_size, num_servers)):
        pieces = layout.slices(runs, slice_size)
        full = layout.full_slice_elems(slice_size)
        assert all(piece.length == full for piece in pieces[:-1])
        turns += [piece.server for piece in pieces]
    assert turns == [turn % num_servers for turn in range(len(turns))]


@given(layouts, slice_sizes, servers)
def test_whole_tensors_go_to_the_server_that_has_the_fewest_elements(
    of: List[Layout], slice_size: int, num_servers: int
) -> None:
    loads = [0] * num_servers
    for layout, runs in zip(of, placed("whole_tensors", of, slice_size, num_servers)):
        if layout.size_elems:
            ((one, length),) = runs
            assert (loads[one], length) == (min(loads), layout.size_elems)
        loads = loads_with(loads, runs)


# What a user's own may do.


def own(runs: List[Run]) -> Type[Placement]:
    class Own(Placement):
        def place(self, *_: object) -> List[Run]:
            return runs

    return Own


@pytest.mark.parametrize("name", ["", "x" * 65, "balanced"])
def test_a_name_that_can_not_be_registered_is_refused(register: object, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r}"):
        PLACEMENTS.register(name, own([]))
    assert type(PLACEMENTS.find("balanced")()) is Balanced


def test_a_module_that_is_imported_twice_registers_twice(register: object) -> None:
    for _ in range(2):
        PLACEMENTS.register("biases_last", BiasesLast)
    assert isinstance(PLACEMENTS.find("biases_last")(), BiasesLast)


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([(0, 3), (1, 2)], "6 elements together"),
        ([(0, 3), (0, 3)], "each once"),
        ([(0, 3), (2, 3)], "2 servers"),
        ([(-1, 6)], "2 servers"),
        ([(0, 6), (1, 0)], "without elements"),
        ([(0, 7), (1, -1)], "without elements"),
        ([], "6 elements together"),
        ([None], "TypeError"),
        ([(0, 4), (1, 2)], "a multiple of 3 elements"),
    ],
)
def test_a_placement_that_returns_nonsense_ends_the_job_and_is_named(
    register: object, runs: List[Run], why: str
) -> None:
    PLACEMENTS.register("own", own(runs))
    job = ready(assembled(), "own")
    replies = job.handle(worker(0), DeclareKey(3, (2, 3), "float32", "w", "rows"))
    failure = aborted(replies, "the placement 'own' failed for parameter 'w' (key 3)", ConfigError)
    assert why in failure.reason


# The scheduler's part.


def ready(job: Job, *chosen: str) -> Job:
    for rank in range(2):
        settings = JobSettings(SLICE_SIZE, placement=chosen[rank % len(chosen)])
        job.handle(worker(rank), Ready(settings))
    return job


@pytest.mark.parametrize("name", MEMBERS)
def test_the_job_places_keys_as_its_workers_have_agreed(name: str) -> None:
    job = ready(assembled(), name)
    of = [950, 30, 0, 420, 100]
    found = []
    for key, size in enumerate(of):
        ((_, answer),) = job.handle(worker(1), DeclareKey(key, (size,), "float32"))
        assert isinstance(answer, DeclaredKey)
        found.append(answer.runs)
    assert found == placed(name, [Dense((size,)) for size in of], SLICE_SIZE, 2)


def test_a_placement_is_told_the_layout_the_loads_of_all_servers_and_their_hosts(
    register: object,
) -> None:
    told: List[Tuple] = []

    class Listens(Placement):
        def place(self, layout: Layout, *others: object) -> List[Run]:
            told.append((layout.shape, layout.size_elems, layout.grain_elems, *others))
            return [(1, layout.size_elems)]

    PLACEMENTS.register("listens", Listens)
    job = Job(NAME, 2, 2)
    for rank in range(2):
        job.handle(worker(rank), hello("worker", rank))
        job.handle(server(rank), hello("server", 1 - rank, host=f"10.0.0.{rank}"))
    ready(job, "listens")
    job.handle(worker(0), DeclareKey("v", (7,), "float32"))
    job.handle(worker(0), DeclareKey("w", (5, 30), "float32", layout="rows"))
    job.handle(worker(0), DeclareKey("x", (2, SLICE_SIZE + 1), "float32", layout="rows"))
    hosts = Topology(("10.0.0.1", "10.0.0.0"), ("10.0.0.7", "10.0.0.7"))
    assert told == [
        ((7,), 7, 1, SLICE_SIZE, [0, 0], hosts),
        ((5, 30), 150, 30, 90, [0, 7], hosts),
        ((2, SLICE_SIZE + 1), 202, SLICE_SIZE + 1, SLICE_SIZE + 1, [0, 157], hosts),
    ]


def test_an_unknown_placement_ends_the_job_and_is_told_with_those_that_there_are() -> None:
    job = assembled()
    replies = job.handle(worker(1), Ready(JobSettings(placement="tests.own.Class")))
    failure = aborted(replies, "no placement 'tests.own.Class'", ConfigError)
    assert all(name in failure.reason for name in MEMBERS)
    assert "P3KV_PLACEMENT" in failure.words and "P3KV_PLUGINS" in failure.words
    assert (failure.role, failure.rank) == ("worker", 1)


def test_workers_that_want_different_placements_end_the_job() -> None:
    job = ready(assembled(), "balanced", "round_robin")
    assert job.failure is not None
    for word in ("worker 0", "worker 1", "placement='balanced'", "placement='round_robin'"):
        assert word in f"{job.failure.where}: {job.failure.reason}"


# Whole jobs.

PLUGIN = {"P3KV_PLUGINS": "own_placement"}


def places_told(output: str) -> List[Tuple[int, List[Run]]]:
    """What `placed.py` has printed, in the order in which keys were declared."""
    found = []
    for line in output.splitlines():
        size, _, runs = line.partition(" elements:")
        pairs = (run.split("@") for run in runs.split())
        found.append((int(size), [(int(server), int(length)) for length, server in pairs]))
    return found


@pytest.mark.parametrize(
    ("name", "training", "settings"),
    [
        ("round_robin", "sgd-workers", SUMS_ONLY),
        pytest.param("whole_tensors", "sgd-servers", {}, marks=pytest.mark.long),
        ("biases_last", "sgd-workers", {**SUMS_ONLY, **PLUGIN}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_trains_right_and_keeps_all_elements_where_its_placement_says(
    tmp_path: Path, name: str, training: str, settings: Dict[str, object]
) -> None:
    result = run_job(
        "placed.py",
        [tmp_path, training],
        workers=2,
        servers=2,
        P3KV_SLICE_SIZE=exact_model.SLICE_SIZE,
        P3KV_PLACEMENT=name,
        **settings,
    )
    assert result.code == 0, result.output
    trained = exact_model.saved(tmp_path, training)
    exact_model.assert_trained_as_by_one_process(trained, "sgd")
    told = places_told(result.said_by("worker 0"))
    assert told == places_told(result.said_by("worker 1"))
    of = [size for size, _ in told]
    assert sorted(of) == sorted(array.size for array in trained.values())
    layouts = [Dense((size,)) for size in of]
    assert [runs for _, runs in told] == placed(name, layouts, exact_model.SLICE_SIZE, 2)


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_a_plugin_that_can_not_be_imported_is_one_line(role: str) -> None:
    with held_port() as held:
        process = start_role(
            role,
            [sys.executable, "-c", "import p3kv"],
            held.getsockname()[1],
            P3KV_PLUGINS="nowhere.to_be_found",
        )
        output = output_of(process, DEADLINE_S)
    assert output == (
        f"p3kv {role}: can't import nowhere.to_be_found, which P3KV_PLUGINS names: "
        "ModuleNotFoundError: No module named 'nowhere'\n"
    )
    assert process.returncode == 1
