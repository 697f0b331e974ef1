"""Settings and a process's place: what the environment says, what code says, and what is wrong."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import p3kv
from p3kv import config
from p3kv.config import Launch, Settings, overrides, settings
from p3kv.errors import ConfigError
from p3kv.frontends.mxnet import environment

LAUNCH = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "2",
    "P3KV_SECRET": "only the job knows it",
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings in code or in the environment, and none left behind."""
    monkeypatch.setattr(overrides, "_overrides", {})
    monkeypatch.setattr(overrides, "_frozen", False)
    for name in settings_names():
        monkeypatch.delenv(f"P3KV_{name.upper()}", raising=False)
    yield


def settings_names() -> list:
    return [field.name for field in fields(Settings)]


# Settings.


def test_without_any_setting_the_defaults_hold() -> None:
    assert Settings.from_environment({}) == Settings()
    assert Settings().slice_size is None  # measured


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("slice_size", "1000", 1000),
        ("silence_timeout_s", "30", 30.0),
        ("warn_after_s", "3", 3.0),
        ("stop_timeout_s", "0", 0.0),
        ("deterministic", "1", True),
        ("check_finite", "1", True),
        ("let_workers_leave", "1", True),
        ("placement", "round_robin", "round_robin"),
        ("gradient_codec", "float16", "float16"),
        ("value_codec", "float16", "float16"),
        ("transport", "memory", "memory"),
        ("encrypt", "1", True),
        ("consistency", "own", "own"),
        ("leave_zero_rows_out", "0", False),
        ("local_aggregation", "0", False),
        ("priorities", "0", False),
        ("rendezvous_timeout_s", "2.5", 2.5),
        ("send_buffer_bytes", "8192", 8192),
        ("stall_timeout_s", "60", 60.0),
        ("switch_interval_s", "0", 0.0),
        ("summary_every", "100", 100),
        ("metrics_port", "0", 0),
        ("metrics_host", "10.0.0.1", "10.0.0.1"),
        ("checkpoint_dir", "/tmp/there", "/tmp/there"),
        ("checkpoint_every", "50", 50),
        ("resume", "1", True),
        ("trace", "/tmp/here", "/tmp/here"),
        ("updates", "workers", "workers"),
        ("verbose", "2", 2),
    ],
)
def test_every_setting_can_be_set_by_environment_and_in_code(
    fresh: None, monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(f"P3KV_{name.upper()}", text)
    assert getattr(config.current(), name) == value
    monkeypatch.delenv(f"P3KV_{name.upper()}")
    p3kv.configure(**{name: value})
    assert getattr(config.current(), name) == value


def test_the_table_above_has_every_setting() -> None:
    marks = test_every_setting_can_be_set_by_environment_and_in_code.pytestmark  # type: ignore
    assert sorted(row[0] for row in marks[0].args[1]) == sorted(settings_names())


def test_code_counts_more_than_the_environment(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P3KV_SLICE_SIZE", "1000")
    monkeypatch.setenv("P3KV_VERBOSE", "1")
    p3kv.configure(slice_size=2000)
    assert config.current().slice_size == 2000
    assert config.current().verbose == 1


@pytest.mark.parametrize(
    ("theirs", "ours", "name"),
    [
        ("MXNET_KVSTORE_SLICE_THRESHOLD", "P3KV_SLICE_SIZE", "slice_size"),
        ("PS_VERBOSE", "P3KV_VERBOSE", "verbose"),
    ],
)
def test_what_mxnet_s_users_have_set_already_counts_where_ours_is_not_set(
    theirs: str, ours: str, name: str
) -> None:
    assert getattr(Settings.from_environment({theirs: "2"}), name) == 2
    assert getattr(Settings.from_environment({theirs: "2", ours: "3"}), name) == 3


@pytest.mark.parametrize(
    ("variable", "name"),
    [("MXNET_KVSTORE_SLICE_THRESHOLD", "slice_size"), ("PS_VERBOSE", "verbose")],
)
@pytest.mark.parametrize("text", ["-1", "many"])
def test_a_wrong_value_of_theirs_is_told_with_their_variable(
    variable: str, name: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \({variable}\) is '{text}'.*must be a whole"):
        Settings.from_environment({variable: text})


def test_spaces_around_a_value_do_not_count() -> None:
    variables = {"P3KV_SLICE_SIZE": " 7", "P3KV_PRIORITIES": "no ", "P3KV_STALL_TIMEOUT_S": " 60 "}
    expected = Settings(slice_size=7, priorities=False, stall_timeout_s=60.0)
    assert Settings.from_environment(variables) == expected


def test_a_front_end_s_variable_counts_where_ours_is_not_set_and_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "_FALL_BACKS", {})
    assert Settings.from_environment({"MXNET_KVSTORE_SLICE_THRESHOLD": "2"}) == Settings()
    for variable in ("ONE_TIMEOUT", "OTHER_TIMEOUT"):
        config.add_aliases({"stall_timeout_s": variable})
    for theirs in ("ONE_TIMEOUT", "OTHER_TIMEOUT"):
        assert Settings.from_environment({theirs: "7"}).stall_timeout_s == 7
        both = {theirs: "7", "P3KV_STALL_TIMEOUT_S": "8"}
        assert Settings.from_environment(both).stall_timeout_s == 8
        with pytest.raises(ConfigError, match=rf"stall_timeout_s \({theirs}\) is 'soon'.*a number"):
            Settings.from_environment({theirs: "soon"})


@pytest.mark.parametrize("name", settings_names())
def test_an_empty_variable_is_one_that_is_not_set(name: str) -> None:
    assert Settings.from_environment({f"P3KV_{name.upper()}": ""}) == Settings()


@pytest.mark.parametrize("text", ["1", "true", "True", "yes", "on", "ON"])
@pytest.mark.parametrize("name", ["deterministic", "priorities"])
def test_words_for_yes(name: str, text: str) -> None:
    assert getattr(Settings.from_environment({f"P3KV_{name.upper()}": text}), name) is True


@pytest.mark.parametrize("text", ["0", "false", "False", "no", "off"])
@pytest.mark.parametrize("name", ["deterministic", "priorities"])
def test_words_for_no(name: str, text: str) -> None:
    assert getattr(Settings.from_environment({f"P3KV_{name.upper()}": text}), name) is False


WRONG: Tuple[Tuple[str, Any], ...] = (
    ("slice_size", 0),
    ("slice_size", -1),
    ("slice_size", 2**40),
    ("slice_size", 1.5),
    ("slice_size", "many"),
    ("rendezvous_timeout_s", 0.0),
    ("rendezvous_timeout_s", -3.0),
    ("rendezvous_timeout_s", float("nan")),
    ("rendezvous_timeout_s", float("inf")),
    ("rendezvous_timeout_s", "soon"),
    ("send_buffer_bytes", 100),
    ("send_buffer_bytes", "64k"),
    ("switch_interval_s", 2),
    ("summary_every", -1),
    ("metrics_port", 65536),
    ("switch_interval_s", "-0.1"),
    ("verbose", -1),
    ("verbose", "very"),
    ("deterministic", "maybe"),
    ("deterministic", 2),
    ("priorities", "some"),
    ("placement", "x" * 257),
    ("consistency", "x" * 257),
)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_told_with_its_variable_and_what_it_must_be(name: str, value: Any) -> None:
    variable = f"P3KV_{name.upper()}"
    with pytest.raises(ConfigError, match=rf"{variable}.*{value}.*must be"):
        Settings.from_environment({variable: str(value)})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_in_code_is_told_where_it_is_set_and_changes_nothing(
    fresh: None, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{value}.*must be"):
        p3kv.configure(**{name: value})
    assert config.current() == Settings()


def test_an_unknown_setting_is_told_with_those_that_there_are(fresh: None) -> None:
    with pytest.raises(ConfigError, match=r"no setting 'slices'.*slice_size"):
        p3kv.configure(slices=3)


def test_settings_in_code_that_come_after_the_store_are_told(fresh: None) -> None:
    p3kv.configure(slice_size=2000)
    assert config.freeze().slice_size == 2000
    with pytest.raises(ConfigError, match="before"):
        p3kv.configure(slice_size=3000)
    assert config.current().slice_size == 2000


@pytest.mark.parametrize(("text", "value"), [(None, True), ("1", True), ("0", False)])
def test_mxnet_update_on_kvstore_says_who_updates(text: str, value: bool) -> None:
    environ = {} if text is None else {"MXNET_UPDATE_ON_KVSTORE": text}
    assert environment.update_on_kvstore_default(environ) is value


@pytest.mark.parametrize("name", ["placement", "consistency"])
def test_a_rule_in_code_is_named_and_never_given(fresh: None, name: str) -> None:
    for wrong in ("", 7, dict):
        with pytest.raises(ConfigError, match=rf"{name} \(P3KV_{name.upper()}\).*a name"):
            p3kv.configure(**{name: wrong})


def test_a_trace_folder_in_code_is_text(fresh: None) -> None:
    with pytest.raises(ConfigError, match=r"trace \(P3KV_TRACE\) is 7; it must be text"):
        p3kv.configure(trace=7)


def test_plugins_are_modules_with_commas_between() -> None:
    assert config.plugins({}) == config.plugins({"P3KV_PLUGINS": ""}) == []
    assert config.plugins({"P3KV_PLUGINS": "one, two.three,"}) == ["one", "two.three"]
    assert config.optimizer_modules({"P3KV_OPTIMIZERS": "one,two "}) == ["one", "two"]
    assert config.optimizer_modules({"P3KV_PLUGINS": "one"}) == []


# Variables that mean nothing.


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("P3KV_SLICES_SIZE", "P3KV_SLICE_SIZE"),
        ("P3KV_SLICESIZE", "P3KV_SLICE_SIZE"),
        ("P3KV_DETERMINSTIC", "P3KV_DETERMINISTIC"),
        ("P3KV_SECRT", "P3KV_SECRET"),
        ("P3KV_OPTIMIZER", "P3KV_OPTIMIZERS"),
        ("P3KV_SLICE_ELEMENTS", "P3KV_SLICE_SIZE"),
        ("P3KV_RENDEZVOUS_TIMEOUT", "P3KV_RENDEZVOUS_TIMEOUT_S"),
        ("P3KV_COLOUR", None),
    ],
)
def test_a_variable_that_means_nothing_is_told_with_the_nearest_one(
    name: str, nearest: Optional[str]
) -> None:
    unknown = config.unknown_variables({**LAUNCH, "P3KV_JOB": "tuesday", name: "1"})
    assert list(unknown) == [name]
    assert name in unknown[name]
    if nearest is None:
        assert "did you mean" not in unknown[name]
    else:
        assert f"did you mean {nearest}?" in unknown[name]


def test_every_variable_that_the_code_names_is_a_known_one() -> None:
    package = Path(p3kv.__file__).parent
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    named = set(re.findall(r"P3KV_[A-Z_]+[A-Z]", source))
    assert {"P3KV_SLICE_SIZE", "P3KV_LAUNCHER_FD"} <= named
    assert config.unknown_variables(dict.fromkeys(named, "1")) == {}


def test_what_one_process_has_told_of_others_do_not_tell_again() -> None:
    environ = {"P3KV_SLICES": "1", "P3KV_COLOUR": "red"}
    told = config.told_of(environ)
    assert config.unknown_variables({**environ, **told}) == {}
    later = {**environ, **told, "P3KV_TRACES": "here"}
    assert list(config.unknown_variables(later)) == ["P3KV_TRACES"]
    assert config.unknown_variables({**later, **config.told_of(later)}) == {}
    assert config.told_of({"P3KV_TRACE": "here"}) == {}


# The place in the job.


def test_a_process_that_no_launcher_started_has_no_place() -> None:
    assert Launch.from_environment({"DMLC_PS_ROOT_URI": "10.0.0.1"}) is None


def test_the_place_is_what_any_launcher_for_mxnet_says() -> None:
    launch = Launch.from_environment(LAUNCH)
    assert launch is not None
    assert (launch.role, launch.root_host, launch.root_port) == ("worker", "10.0.0.1", 9091)
    assert (launch.num_workers, launch.num_servers) == (4, 2)
    assert launch.rank is None
    assert launch.node_host is launch.interface is None


def test_the_job_s_name_is_given_or_made_of_what_all_its_processes_know() -> None:
    def name(**changes: str) -> str:
        launch = Launch.from_environment({**LAUNCH, **changes})
        assert launch is not None
        return launch.job

    assert name(P3KV_JOB="tuesday") == "tuesday"
    assert name() == name(DMLC_ROLE="server", DMLC_SERVER_ID="1")
    others = [{"DMLC_PS_ROOT_PORT": "9092"}, {"DMLC_NUM_WORKER": "5"}, {"DMLC_NUM_SERVER": "3"}]
    assert len({name(), *(name(**change) for change in others)}) == 4


@pytest.mark.parametrize(
    ("role", "environ", "rank", "task"),
    [
        ("worker", {"DMLC_WORKER_ID": "3"}, 3, None),
        ("worker", {"DMLC_TASK_ID": "2"}, None, 2),
        ("worker", {"DMLC_WORKER_ID": "3", "DMLC_TASK_ID": "2"}, 3, 2),
        ("worker", {"OMPI_COMM_WORLD_RANK": "1"}, None, 1),
        ("worker", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, None, 0),
        # Of a batch script, which starts all of a job: all its processes have the same.
        ("worker", {"SLURM_PROCID": "0"}, None, None),
        ("worker", {"DMLC_SERVER_ID": "1"}, None, None),
        ("server", {"DMLC_SERVER_ID": "1"}, 1, None),
        ("server", {"DMLC_TASK_ID": "2"}, None, 2),
        # MPI counts all its processes: on a server its number says nothing of the servers.
        ("server", {"OMPI_COMM_WORLD_RANK": "5", "SLURM_PROCID": "5"}, None, None),
        ("worker", {"DMLC_WORKER_ID": ""}, None, None),
    ],
)
def test_a_launcher_states_ranks_or_numbers_its_processes(
    role: str, environ: Dict[str, str], rank: Optional[int], task: Optional[int]
) -> None:
    launch = Launch.from_environment({**LAUNCH, "DMLC_ROLE": role, **environ})
    assert launch is not None
    assert (launch.rank, launch.task) == (rank, task)


def test_addresses_come_from_the_environment() -> None:
    launch = Launch.from_environment(
        {**LAUNCH, "DMLC_NODE_HOST": "10.0.0.9", "DMLC_INTERFACE": "eth1"}
    )
    assert launch is not None
    assert (launch.node_host, launch.interface) == ("10.0.0.9", "eth1")


@pytest.mark.parametrize("role", ["observer", "", "Worker"])
def test_an_unknown_role_is_told_with_those_that_there_are(role: str) -> None:
    with pytest.raises(ConfigError, match=f"'{role}'.*scheduler, server, worker"):
        Launch.from_environment({**LAUNCH, "DMLC_ROLE": role})


@pytest.mark.parametrize("name", [name for name in LAUNCH if name != "DMLC_ROLE"])
@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_variable_is_told_by_name(name: str, missing: str) -> None:
    environ = {**LAUNCH, name: missing}
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        Launch.from_environment({n: v for n, v in environ.items() if v is not None})


@given(
    st.sampled_from(["DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"]),
    st.one_of(
        st.integers(max_value=0),
        st.integers(min_value=65536),
        st.floats(),
        st.sampled_from(["two", "0x10", "1e3", " ", "-"]),
    ),
)
def test_a_wrong_number_is_told_with_its_variable(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is.*must be a number from 1 to 65535"):
        Launch.from_environment({**LAUNCH, name: str(value)})


@pytest.mark.parametrize("name", ["DMLC_WORKER_ID", "DMLC_TASK_ID", "P3KV_SCHEDULER_FD"])
def test_a_wrong_optional_number_is_told_with_its_variable(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'first'"):
        Launch.from_environment({**LAUNCH, name: "first"})


@pytest.mark.parametrize(
    "name", ["DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_WORKER_ID", "P3KV_LAUNCHED", "DMLC_NODE_HOST"]
)
@pytest.mark.parametrize("text", ["1\n2", "\x1b[2J", "\u202e"])
def test_a_wrong_value_that_can_t_be_printed_is_told_in_one_line(name: str, text: str) -> None:
    environ = {**LAUNCH, name: text}
    with pytest.raises(ConfigError) as told:
        Launch.from_environment(environ)
    assert str(told.value).isprintable()
