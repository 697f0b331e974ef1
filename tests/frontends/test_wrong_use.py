"""Whoever uses p3kv wrongly is told soon, where he looks, and what to do about it."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any, Dict, List

import pytest

import p3kv
from p3kv.config import Settings
from p3kv.errors import ConfigError
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    SCRIPTS,
    SUMS_ONLY,
    end,
    environment,
    held_port,
    output_of,
    results,
    run,
    run_job,
    start_role,
)

# Settings.


@pytest.mark.parametrize(
    ("name", "value", "wish"),
    [
        ("P3KV_SLICE_SIZE", "abc", "a whole number"),
        ("P3KV_SLICE_SIZE", "2.5", "a whole number"),
        ("P3KV_SLICE_SIZE", "0", "a whole number from 1 to"),
        ("P3KV_SLICE_SIZE", "-4", "a whole number from 1 to"),
        ("P3KV_SLICE_SIZE", "99999999999", "a whole number from 1 to"),
        ("MXNET_KVSTORE_SLICE_THRESHOLD", "many", "a whole number"),
        ("P3KV_RENDEZVOUS_TIMEOUT_S", "0", "a number from 0.1 to"),
        ("P3KV_RENDEZVOUS_TIMEOUT_S", "nan", "a number from 0.1 to"),
        ("P3KV_RENDEZVOUS_TIMEOUT_S", "inf", "a number from 0.1 to"),
        ("P3KV_SEND_BUFFER_BYTES", "100", "a whole number from 4096 to"),
        ("P3KV_DETERMINISTIC", "perhaps", "1 or 0"),
        ("P3KV_PRIORITIES", "yes!", "1 or 0"),
    ],
)
def test_a_wrong_value_of_a_setting_is_named_with_what_it_may_be(
    name: str, value: str, wish: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({name: value})
    for word in (name, value, f"it must be {wish}"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"slice_sise": 3}, ["'slice_sise'", "did you mean 'slice_size'?"]),
        ({"x": 3}, ["'x'", "there are slice_size, deterministic"]),
        ({"slice_size": "3"}, ["slice_size", "'3'", "a whole number from 1 to"]),
        ({"slice_size": True}, ["slice_size", "True", "a whole number from 1 to"]),
        ({"deterministic": 1}, ["deterministic", "True or False"]),
    ],
)
def test_a_wrong_setting_in_code_is_named_and_changes_nothing(
    setting: Dict[str, Any], words: List[str]
) -> None:
    before = p3kv.config.current()
    with pytest.raises(ConfigError) as caught:
        p3kv.configure(**setting)
    assert all(word in str(caught.value) for word in words), caught.value
    assert p3kv.config.current() == before


def test_a_misspelt_variable_is_told_of_once_for_a_job_and_in_a_process_of_its_own() -> None:
    line = "the variable P3KV_SLICE_SICE is set and means nothing: did you mean P3KV_SLICE_SIZE?"
    alone = run(
        [sys.executable, "-c", "import p3kv"],
        environment(P3KV_SLICE_SICE=100),
        timeout_s=DEADLINE_S,
    )
    assert (alone.code, alone.output) == (0, f"p3kv: {line}\n")
    job = run_job("join.py", workers=2, P3KV_SLICE_SICE=100, **SUMS_ONLY)
    assert job.code == 0, job.output
    assert job.output.count("P3KV_SLICE_SICE") == 1 and line in job.output, job.output
    with held_port() as port:
        command = [sys.executable, "-c", "import p3kv"]
        server = start_role(
            "server", command, port.getsockname()[1], P3KV_SLICE_SICE=100,
            P3KV_RENDEZVOUS_TIMEOUT_S=0.5,
        )  # fmt: skip
        said = output_of(server, timeout_s=DEADLINE_S)
        end(server)
    assert said is not None and said.count("P3KV_SLICE_SICE") == 1, said
    assert f"p3kv server: {line}" in said


# What a running script does wrong.


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """How a worker was refused each thing that it tried."""
    path = tmp_path_factory.mktemp("refusals") / "refusals.json"
    result = run_job("refusals.py", [path])
    assert result.code == 0, result.output
    found: Dict[str, Any] = json.loads(path.read_text())
    return found


DENSE = ["NotSupportedError", "sparse", "attach_grad(stype='row_sparse')"]
UNKNOWN_KEY = ["KeyMismatchError", "key 'nobody' is unknown on worker 0", "kv.init"]
NO_STATES = ["StatesError", "is no file of optimizer states", "trainer.save_states"]
REFUSALS = {
    "configure too late": ["ConfigError", "before the first mx.kv.create('p3')"],
    "push of an unknown key": UNKNOWN_KEY,
    "pull of an unknown key": UNKNOWN_KEY,
    "pushpull of an unknown key": UNKNOWN_KEY,
    "init of a known key": ["KeyMismatchError", "'known' was initialised before", "another store"],
    "init of bool": ["NotSupportedError", "'mask'", "dtype bool", "use float16, float32"],
    "a Trainer of bool": ["NotSupportedError", "parameter 'net_mask' (key 0) has dtype bool"],
    "init of bfloat16": ["NotSupportedError", "'half'", "dtype bfloat16", "use float16, float32"],
    "init of a csr array": [*DENSE, "'sparse'", "csr"],
    "pushpull of a sparse array": [*DENSE, "'known'", "row_sparse"],
    "pushpull of another shape": ["KeyMismatchError", "'known'", "(3,)", "(4,)"],
    "pushpull of another dtype": ["KeyMismatchError", "'known'", "float32", "float64"],
    "row_sparse_pull": [*DENSE, "'known'", "no rows to pull"],
    "compression too late": ["ConfigError", "'2bit' (threshold=0.5)", "before the first key"],
    "compression of an unknown type": ["ConfigError", "no codec '3bit', only 2bit, bfloat16"],
    "compression without a type": ["ConfigError", "{'threshold': 0.5}", "'type'", "2bit, bfloat16"],
    "compression by lists": ["ConfigError", "[0.5]", "such as {'type': '2bit'"],
    "compression of other dtypes": ["ConfigError", "'doubles'", "it takes no parameters"],
    "compression by another parameter": ["ConfigError", "'treshold'", "it takes threshold"],
    "compression by the Trainer": ["ConfigError", "threshold", "is 0", "from 1e-06 to 65504"],
    "states without an optimizer": ["StatesError", "could be saved", "kv.set_optimizer"],
    "states in no file of states": [*NO_STATES, "UnpicklingError"],
    "half a file of states": NO_STATES,
    "states that are none": NO_STATES,
    "states of other keys": ["StatesError", "states of keys 7, 'nobody'", "this store has keys"],
    "states of another shape": ["StatesError", "float32 (3,)", "has (float32 (3, 2), float32"],
    "states of another optimizer": ["StatesError", "AdaGrad", "Adam", "the file's optimizer"],
    "states of too few arrays": ["StatesError", "the state float32 (3,)", "use the model"],
    "states in a file that is not there": ["FileNotFoundError", ".missing"],
    "states for a folder that is not there": ["NotADirectoryError", "missing"],
    "an optimizer as a command": ["NotSupportedError", "command 0 ('pickled')", "kv.set_optimizer"],
    "compression as a command": ["NotSupportedError", "kv.set_gradient_compression"],
    "a profiler's command": ["NotSupportedError", "command 5", "P3KV_TRACE"],
    "a profile of the servers": ["NotSupportedError", "mx.profiler.set_state", "P3KV_TRACE"],
    "a handle": ["AttributeError", "no handle", "P3KV_TRACE"],
    "an update here": ["NotSupportedError", "push the gradient to the store"],
    "a script's own command": ["NotSupportedError", "command 99 ('hello')"],
    "an updater": ["NotSupportedError", "updater", "kv.set_optimizer"],
    "an unknown capability": ["ValueError", "'teleport'"],
}  # fmt: skip


def test_every_refusal_that_was_tried_is_expected(refusals: Dict[str, Any]) -> None:
    assert refusals.keys() == REFUSALS.keys()


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_call_is_refused_at_once_with_the_remedy(
    refusals: Dict[str, Any], name: str
) -> None:
    assert refusals[name] is not None, "it was ignored"
    error, message, seconds = refusals[name]
    for word in REFUSALS[name]:
        assert word in f"{error}: {message}"
    assert seconds < DEADLINE_S


@pytest.mark.parametrize("on_servers", [1, 0])
def test_an_svrg_module_is_told_what_it_can_do_and_then_trains(on_servers: int) -> None:
    """It has no `update_on_kvstore`."""
    result = run_job("svrg.py", workers=2, MXNET_UPDATE_ON_KVSTORE=on_servers)
    assert result.code == 0, result.output
    if on_servers:
        assert result.output.count("refused: _SVRGOptimizer.default_opt is a SGD") == 2
        assert "SVRGModule and FeedForward, MXNET_UPDATE_ON_KVSTORE=0" in result.output
    else:
        off = re.findall(r"trained to within ([\d.]+)", result.output)
        # How near it comes is MXNet's affair: the sum of all workers' full gradients is no mean.
        assert len(off) == 2 and len({*off}) == 1 and float(off[0]) < 1.0, result.output


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_mistake_of_the_script_s_is_one_line_with_its_place_or_a_traceback_if_wanted(
    verbose: int,
) -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        start = time.monotonic()
        command = [sys.executable, str(SCRIPTS / "misuse.py")]
        processes = {
            role: start_role(role, command, port, P3KV_VERBOSE=verbose, **SUMS_ONLY)
            for role in ("scheduler", "server", "worker")
        }
        ended = results(processes, start, timeout_s=DEADLINE_S)
    words = "key 'nobody' is unknown on worker 0; initialise it"
    said = ended["worker"].output
    assert words in said
    assert ("Traceback" in said) == (verbose == 1)
    if not verbose:
        assert said.startswith("p3kv worker: ") and said.endswith("(misuse.py, line 9)\n")
        assert len(said.splitlines()) == 1
    for role in ("scheduler", "server"):
        assert f"worker 0: its script ended with KeyMismatchError: {words}" in ended[role].output
    assert {result.code for result in ended.values()} == {1}


def test_the_store_outside_a_launch_trains_in_its_process_alone_and_says_so() -> None:
    environ = {k: v for k, v in environment().items() if not k.startswith("DMLC_")}
    result = run([sys.executable, str(SCRIPTS / "alone.py")], environ, timeout_s=DEADLINE_S)
    assert result.code == 0, result.output
    assert "all weights are right" in result.output
    assert "trains in this process alone" in result.output
    assert "p3kv launch -n 2 -- python train.py" in result.output


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("p3:delayd", {}, "there is no consistency 'delayd'"),
        ("p3", {"P3KV_CONSISTENCY": "delayed:stalenes=1"}, "did you mean 'staleness'?"),
        ("p3", {"P3KV_GRADIENT_CODEC": "topq"}, "did you mean 'topk'?"),
        ("dist_sinc_p3", {}, "did you mean 'dist_sync_p3'?"),
    ],
)
def test_a_process_alone_refuses_names_that_a_job_would_refuse(
    name: str, settings: Dict[str, str], words: str
) -> None:
    environ = {k: v for k, v in environment(**settings).items() if not k.startswith("DMLC_")}
    command = [sys.executable, "-c", f"import p3kv, mxnet; mxnet.kv.create({name!r})"]
    result = run(command, environ, timeout_s=DEADLINE_S)
    assert result.code == 1 and "ConfigError: " in result.output, result.output
    assert words in result.output, result.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dist_sync", ["kvstore='dist_sync' is MXNet's own", "Write kvstore='p3'"]),
        ("p33", ["MXNet has no kvstore 'p33'", "did you mean 'p3'?"]),
        ("mine", ["MXNet has no kvstore 'mine'", "p3kv's is 'p3'"]),
    ],
)
def test_a_store_that_can_not_work_in_a_job_is_refused(name: str, words: List[str]) -> None:
    result = run_job("other_store.py", [name], workers=2, **SUMS_ONLY)
    for word in words:
        assert word in result.said_by("worker 0"), result.output
        assert word in result.said_by("worker 1"), result.output
    assert result.code == 1


@pytest.mark.parametrize("name", ["device", "none"])
def test_workers_that_train_each_alone_say_so(name: str) -> None:
    result = run_job("other_store.py", [name], workers=2, **SUMS_ONLY)
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        assert said.count("this worker trains alone") == 1, result.output
        assert "Write kvstore='p3'" in said
        assert "trained" in said
    assert result.code == 0, result.output


def test_workers_that_disagree_on_a_key_all_learn_which_and_how() -> None:
    result = run_job("disagree.py", workers=3, servers=1, **SUMS_ONLY)
    for rank in range(3):
        said = result.said_by(f"worker {rank}")
        learned = re.search(r"learned within ([0-9.]+) s: (.*)", said)
        assert learned, result.output
        assert float(learned[1]) < DEADLINE_S
        for word in (
            "key 'embedding'", "worker 1 has shape (3, 4) and dtype float64",
            "has shape (4, 3) and dtype float32", "same model",
        ):  # fmt: skip
            assert word in learned[2], said
    for part in ("server 0", "scheduler"):
        assert "workers disagree on key 'embedding'" in result.said_by(part)
    assert result.code == 1


def test_workers_with_different_settings_all_learn_which() -> None:
    with held_port() as port:
        number = port.getsockname()[1]
        start = time.monotonic()
        processes = {
            "scheduler": start_role("scheduler", JOIN, number, workers=2),
            "server": start_role("server", JOIN, number, workers=2, **SUMS_ONLY),
            **{
                f"worker {rank}": start_role(
                    "worker", JOIN, number, workers=2,
                    DMLC_WORKER_ID=rank, P3KV_SLICE_SIZE=100 + rank,
                )
                for rank in range(2)
            },
        }  # fmt: skip
        ended = results(processes, start, timeout_s=DEADLINE_S)
    for name, result in ended.items():
        for word in ("slice_size=100", "slice_size=101", "the same on all workers"):
            assert word in result.output, f"{name} said {result.output}"
        told_of = re.search(r"p3kv (?:\w+: )?worker ([01]): it \(", result.output)
        assert told_of and f"worker {1 - int(told_of[1])} (" in result.output, result.output
        assert result.code == 1


@pytest.mark.parametrize(
    ("variable", "what"), [("P3KV_PLACEMENT", "placement"), ("P3KV_CONSISTENCY", "consistency")]
)
def test_a_name_that_nobody_has_registered_is_one_line_on_all_processes(
    variable: str, what: str
) -> None:
    result = run_job("join.py", workers=2, servers=1, **{variable: "by_lnk"}, **SUMS_ONLY)
    for part in ("worker 0", "worker 1", "server 0", "scheduler"):
        # Of those that say the same, one is shown.
        told = rf" p3kv (\w+: )?worker [01]: there is no {what} 'by_lnk', only [^\n]+"
        assert re.fullmatch(told, result.said_by(part)), result.output
    assert result.code == 1


def test_an_optimizer_that_the_servers_do_not_know_is_named_with_the_remedy() -> None:
    result = run_job("unknown_optimizer.py")
    assert result.code == 1
    for who in ("worker 0", "server 0"):
        said = result.said_by(who)
        assert "the servers know no optimizer 'Cubic'. Set P3KV_OPTIMIZERS" in said
        assert "Traceback" not in said
