"""`p3kv tune`: real scripts with several numbers of servers, the equation, and what is chosen."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Dict, List, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.cluster import Cluster, missing_requirements
from p3kv.config import MAX_SLICE_ELEMS, Tuned
from p3kv.config.trials import Report
from p3kv.errors import ConfigError
from p3kv.tools.trials import StepCounts, StoreTimes
from p3kv.tools.tune import Equation, ServerTuning, choice, equation, fit, size_choice, sizes, table
from tests import sshd
from tests.jobs import SCRIPTS, SUMS_ONLY, JobResult, environment, run
from tests.names import give_names
from tests.on_cluster import needs
from tests.torch_environment import NEEDS_TORCH, PYTHON

STEPS = StepCounts.of(6)
SLOW_SERVERS = {
    "P3KV_PLUGINS": "slow_codec",
    "P3KV_GRADIENT_CODEC": "slow:element_s=4e-6",
    "P3KV_SLICE_SIZE": 2000,
    "P3KV_LOCAL_AGGREGATION": 0,
}
"""A server takes 320 ms for both workers' gradients of 40,000 elements in each step."""
FRONT_ENDS = [
    pytest.param(sys.executable, "tuned.py", id="MXNet"),
    pytest.param(
        str(PYTHON), "torch_tuned.py", id="PyTorch", marks=[NEEDS_TORCH, pytest.mark.long]
    ),
]


def p3kv(*words: object, python: str = sys.executable, **changes: object) -> JobResult:
    command = [python, "-m", "p3kv", *map(str, words)]
    return run(command, environment(**changes), 150)


def measured(*rounds: Sequence[float]) -> StoreTimes:
    """Trials with these times of steps, on one worker."""
    found = StoreTimes([], [], [])
    for steps_s in rounds:
        until_s = np.cumsum([0.0, *[1.0] * STEPS.warm_up, *steps_s])
        found.add(STEPS, [Report(tuple(until_s), tuple(until_s))])
    return found


def tuning(**by_servers: StoreTimes) -> ServerTuning:
    return ServerTuning(2, 2, STEPS, {int(name[1:]): one for name, one in by_servers.items()}, {})


def rows(output: str) -> Dict[int, List[str]]:
    """The cells of the table, by number of servers."""
    lines = re.findall(r"^ +(\d+)  +(\S.*)$", output, re.M)
    return {int(count): re.split(r"  +", cells) for count, cells in lines}


def gain(output: str) -> float:
    """How many times as fast as with one server a step is with those that were chosen."""
    return float(re.findall(r"step is ([\d.]+)\s+times", output)[0])


@pytest.mark.parametrize(("python", "script"), FRONT_ENDS)
def test_servers_that_share_slow_work_pay_and_launch_takes_their_number(
    python: str, script: str, tmp_path: Path
) -> None:
    file = tmp_path / "tuned.json"
    words = ["tune", "--max-servers", 2, "--rounds", 1, "--steps", 6, "--write", file]
    result = p3kv(*words, "--", python, SCRIPTS / script, 0.0, python=python, **SLOW_SERVERS)
    assert result.code == 0, result.output
    found = rows(result.output)
    assert list(found) == [1, 2], result.output
    assert "Choice: 2 servers on each host, with which a step is" in result.output
    assert gain(result.output) > 1.3, result.output
    assert "p3kv-trial" not in result.output
    assert json.loads(file.read_text()) == {
        "servers_per_host": 2, "workers": 2, "hosts": 1, "slice_size": None,
    }  # fmt: skip
    says = "import os; print('servers:', os.environ['DMLC_NUM_SERVER'])"
    launched = ["--tuned", file, "--", sys.executable, "-c", f"import p3kv; {says}"]
    result = p3kv("launch", "-n", 1, *launched)
    assert "servers: 2" in result.output, result.output
    assert "is for 2 workers on 1 host; with 1 on 1 another number" in result.output


@pytest.mark.long
@pytest.mark.parametrize(("python", "script"), FRONT_ENDS)
def test_where_servers_do_little_one_is_chosen(python: str, script: str) -> None:
    words = ["tune", "--max-servers", 2, "--rounds", 1, "--steps", 6, "--", python]
    result = p3kv(*words, SCRIPTS / script, 0.2, python=python, **SUMS_ONLY)
    assert result.code == 0, result.output
    assert list(rows(result.output)) == [1, 2], result.output
    assert "Choice: 1 server on each host" in result.output or gain(result.output) < 1.15


@pytest.mark.long
def test_slice_sizes_are_measured_with_the_servers_that_were_chosen(tmp_path: Path) -> None:
    """A server takes 10 ms for each slice here, so large ones pay."""
    file = tmp_path / "tuned.json"
    slow = {**SLOW_SERVERS, "P3KV_GRADIENT_CODEC": "slow:element_s=0,slice_s=0.01"}
    result = p3kv(
        "tune", "--max-servers", 1, "--rounds", 1, "--steps", 6, "--slice-sizes", "1000 50000",
        "--write", file, "--", sys.executable, SCRIPTS / "tuned.py", 0.0, **slow,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert "Slices: 50000 elements, with which a step is" in result.output, result.output
    says = "from p3kv import config; print('size:', config.current().slice_size)"
    launch = [
        "launch",
        "-n",
        1,
        "--tuned",
        file,
        "--",
        sys.executable,
        "-c",
        f"import p3kv; {says}",
    ]
    assert "size: 50000" in p3kv(*launch).output
    assert "size: 7" in p3kv(*launch, P3KV_SLICE_SIZE=7).output


def test_a_script_that_fails_shows_its_own_words_and_ends_the_search() -> None:
    script = SCRIPTS / "short_training.py"
    result = p3kv("tune", "--", sys.executable, script, 1000, 3, **SUMS_ONLY)
    assert result.code == 3, result.output
    said = result.output.splitlines()
    assert said[-2].endswith("its script ended with exit code 3"), result.output
    assert said[-1] == (
        "p3kv tune: round 1 of 3, 1 server on each host: the job failed, as its output says"
    )


def test_a_script_that_ends_early_is_measured_with_the_steps_that_it_makes() -> None:
    words = ["tune", "--max-servers", 1, "--rounds", 1, "--", sys.executable]
    result = p3kv(*words, SCRIPTS / "short_training.py", 8, **SUMS_ONLY)
    assert result.code == 0, result.output
    assert "the script ends after 8 steps: 5 of them are measured, after 2" in result.output
    result = p3kv(*words, SCRIPTS / "short_training.py", 5, **SUMS_ONLY)
    assert result.code == 1
    assert "the script ended after 5 steps, and 8 are needed at least" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--write", "{}/no/such/folder"], "can't write '{}/no/such/folder': No such file"),
        (["--write", "{}"], "can't read '{}': Is a directory"),
        (["--write", "{}/train.py"], "'{}/train.py' is no file of p3kv tune's: "),
        (["--slice-sizes", "many"], "--slice-sizes has 'many'; write numbers of elements from 1"),
        (["--slice-sizes", str(MAX_SLICE_ELEMS + 1)], f"from 1 to {MAX_SLICE_ELEMS}"),
        (["--max-servers", "0"], "0 is not 1 or more"),
    ],
)
def test_what_can_t_be_is_said_before_anything_runs(
    words: List[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('training')")
    filled = [word.format(tmp_path) for word in words]
    result = p3kv("tune", *filled, "--", sys.executable, tmp_path / "train.py")
    assert result.code == 2 and said.format(tmp_path) in result.output, result.output
    assert "round 1" not in result.output
    assert (tmp_path / "train.py").read_text() == "print('training')"


@pytest.mark.parametrize("text", ['{"servers_per_host": 0}', "no JSON", '{"servers": 1}', None])
def test_launch_refuses_a_file_that_tune_has_not_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    if text is not None:
        file.write_text(text)
    result = p3kv("launch", "-n", 1, "--tuned", file, "--", "true")
    said = "can't read" if text is None else "is no file of p3kv tune's: "
    assert result.code == 2 and said in result.output, result.output
    both = p3kv("launch", "-n", 1, "-s", 1, "--tuned", file, "--", "true")
    assert both.code == 2 and "not allowed with argument" in both.output


@pytest.mark.long
@needs(missing_requirements(), sshd.missing())
def test_on_several_hosts_each_gets_its_servers_and_a_host_without_ssh_is_named(
    tmp_path: Path,
) -> None:
    with Cluster(2) as cluster, sshd.ssh_between(cluster, tmp_path) as path:
        give_names(cluster, ["n0", "n1"])

        def tune(hosts: str) -> JobResult:
            process = cluster.hosts[0].popen(
                [
                    sys.executable, "-m", "p3kv", "tune", "-H", hosts, "--rounds", "1", "--steps",
                    "6", "--max-servers", "2", "--write", str(tmp_path / "tuned.json"), "--",
                    "python", str(SCRIPTS / "tuned.py"), "0.0",
                ],
                env=environment(PATH=f"{Path(sys.executable).parent}:{path}", **SLOW_SERVERS),
                stdout=-1, stderr=-2, text=True,
            )  # fmt: skip
            output = process.communicate(timeout=150)[0]
            return JobResult(process.returncode, output, 0.0)

        result = tune("n0,n1")
        assert result.code == 0, result.output
        assert [cells[0] for cells in rows(result.output).values()] == ["2", "4"], result.output
        assert Tuned.read(tmp_path / "tuned.json").hosts == 2
        result = tune("n0,n3")
    assert result.code not in (0, 2) and "n3" in result.output, result.output
    assert "1 server on each host: the job failed, as its output says" in result.output


def test_the_equation_is_found_again() -> None:
    exact = Equation(0.1, 0.4, 0.01)
    found = fit({servers: exact.step_s(servers) for servers in (1, 2, 4, 8, 16)})
    assert found == pytest.approx(exact) and found.best(16) == 6 and found.best(4) == 4
    falling = fit({1: 1.0, 2: 0.5, 4: 0.25})
    assert falling == pytest.approx((0.0, 1.0, 0.0), abs=1e-9)
    assert fit({1: 0.3}).step_s(1) == pytest.approx(0.3)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=6))
def test_no_other_equation_without_negative_parts_is_nearer(times_s: List[float]) -> None:
    servers = [2**n for n in range(len(times_s))]
    found = fit(dict(zip(servers, times_s)))
    columns = np.array([[1, 1 / count, count] for count in servers])
    # The conditions of Karush, Kuhn and Tucker, which hold for nothing else: no part can grow for
    # the better, and those that are not 0 can't shrink either.
    slopes = columns.T @ (columns @ found - times_s)
    assert min(found) >= 0 and min(slopes) > -1e-6
    assert abs(slopes @ found) < 1e-6


def test_the_fewest_servers_are_chosen_that_are_as_fast_as_any() -> None:
    found = tuning(
        _1=measured([0.4] * 6, [0.41] * 6), _2=measured([0.302] * 6, [0.304] * 6),
        _4=measured([0.3] * 6, [0.3] * 6), _8=measured([0.5] * 6, [0.52] * 6),
    )  # fmt: skip
    assert found.servers == 2 and found.confidence == 1.0
    lines = table(found)
    assert lines[2].split() == ["2", "4", "0.303", "s", "1%", *lines[2].split()[5:]]
    assert choice(found) == (
        "Choice: 2 servers on each host, with which a step is 1.34 times as fast as with 1. It is "
        "within 2% of the best in 100% of draws from the measured rounds and steps."
    )
    assert "a step takes " in equation(found) and "% off at most" in equation(found)


def test_a_choice_by_rounds_that_are_far_apart_is_said_to_be_unsure() -> None:
    found = tuning(_1=measured([0.3] * 6, [0.5] * 6), _2=measured([0.29] * 6, [0.49] * 6))
    assert found.confidence < 0.9
    assert "this is not sure. Take more --rounds" in choice(found)
    assert "No equation" in equation(found) and "equation" not in table(found)[0]


def test_p3kv_s_own_slices_stay_where_no_size_gains() -> None:
    found = tuning(_1=measured([0.4] * 6))._replace(
        by_size={None: measured([0.4] * 6), 7: measured([0.399] * 6), 9: measured([0.5] * 6)}
    )
    assert found.slice_size is None and "as p3kv chooses" in size_choice(found)
    assert sizes(found)[1].split() == ["as", "p3kv", "chooses", "0.4", "s"]
    found.by_size[7] = measured([0.2] * 6)
    assert found.slice_size == 7 and "2.00 times as fast" in size_choice(found)


def test_a_file_that_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    for tuned in (Tuned(2, 4, 2), Tuned(1, 4, 2, 50_000)):
        tuned.write(file)
        assert Tuned.read(file) == tuned and list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigError, match="can't write"):
        Tuned(1, 1, 1).write(tmp_path / "none" / "tuned.json")
