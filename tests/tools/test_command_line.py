"""The command line as users see it: help, errors, completion."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, List

import pytest

from p3kv.tools import cli
from tests.jobs import DEADLINE_S, JOIN, SUMS_ONLY, environment, run

P3KV = [sys.executable, "-m", "p3kv"]
COLUMNS = 80


def parsers() -> Iterator[argparse.ArgumentParser]:
    """The parser of the whole command line, and those of its commands."""
    whole = cli._parser()
    yield whole
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@pytest.mark.parametrize("parser", list(parsers()), ids=lambda parser: parser.prog)
def test_the_help_of_every_command_fits_a_terminal_and_leaves_nothing_unexplained(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for line in parser.format_help().splitlines():
        assert len(line) <= COLUMNS, line
    assert parser.description
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action


def test_without_a_command_all_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert "run a whole job" in said and "Traceback" not in said


def test_an_error_of_a_command_is_one_line() -> None:
    wrong = environment(P3KV_SLICE_SIZE="many")
    result = run([*P3KV, "launch", "-n", "1", "--", "true"], wrong, 30)
    assert (result.code, len(result.output.splitlines())) == (2, 1), result.output
    assert result.output.startswith("p3kv launch: slice_size (P3KV_SLICE_SIZE) is 'many'; it must")


@pytest.mark.parametrize("role", ["scheduler", "worker"])
@pytest.mark.parametrize("verbose", [0, 1])
def test_a_module_of_the_users_that_fails_is_one_line_or_a_traceback_if_wanted(
    role: str, verbose: int
) -> None:
    result = run(
        [sys.executable, "-c", "import p3kv"],
        environment(
            DMLC_ROLE=role, DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=9, DMLC_NUM_WORKER=1,
            DMLC_NUM_SERVER=1, P3KV_PLUGINS="no_such_module", P3KV_VERBOSE=verbose,
        ),
        30,
    )  # fmt: skip
    assert result.code == 1
    assert "can't import no_such_module, which P3KV_PLUGINS names" in result.output
    assert ("Traceback" in result.output) == bool(verbose)
    assert verbose or len(result.output.splitlines()) == 1


def test_an_exception_of_a_script_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import p3kv\nfrom p3kv.errors import ConfigError\nraise ConfigError('mine')")
    result = run([*P3KV, "run", str(script)], environment(), 30)
    assert result.code == 1
    assert result.output.startswith("Traceback") and 'train.py", line 3' in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["p3kv", "lau"], ["launch"]),
        (["p3kv", "launch", "--num-w"], ["--num-workers"]),
        (["p3kv", "run", "setup."], ["setup.py"]),
        (["p3kv", "plan", "--model", "resnet50"], ["resnet50_v1", "resnet50_v2"]),
    ],
    ids=["a command", "an option", "a file", "a model"],
)
def test_bash_completes(words: List[str], expected: List[str], tmp_path: Path) -> None:
    printed = run([*P3KV, "--print-completion", "bash"], environment(), 30)
    assert printed.code == 0, printed.output
    (tmp_path / "setup.py").touch()
    quoted = " ".join(words)
    # What bash does when the user presses the tabulator key.
    ask = (
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        "function=$(complete -p p3kv | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
        f'"$function" p3kv {words[-1]} {words[-2]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    answer = subprocess.run(
        ["bash", "-c", f"{printed.output}\n{ask}"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert answer.stdout.split() == expected


@pytest.mark.parametrize(
    ("word", "said"),
    [("lanch", "'lanch'; did you mean 'launch'?"), ("x", "'x'. There are launch, run, compare,")],
)
def test_a_misspelt_command_is_answered_with_the_nearest(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([word, "-n", "2"])
    assert ended.value.code == 2
    assert f"p3kv: error: there is no command {said}" in capsys.readouterr().err


# In an environment of a job.

INHERITED = {
    "ranks": {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": 0},
    "torchrun": {
        "RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x"
    },
    "srun": {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2
    },
    "worker": {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": 1, "DMLC_TASK_ID": 1},
    "server": {"DMLC_ROLE": "server"},
    "scheduler": {
        "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": 9,
        "DMLC_NUM_WORKER": 1, "DMLC_NUM_SERVER": 1,
    },
}  # fmt: skip
SCRIPT = [str(Path(sys.executable).parent / "p3kv")]
SAYS_RANKS = (
    "import os; print('mine:', *sorted(n for n in os.environ if n in ('RANK', 'WORLD_SIZE', "
    "'MASTER_ADDR', 'DMLC_TASK_ID', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK', 'DMLC_WORKER_ID')))"
)
COMMANDS = {
    "--version": (["--version"], 0, "p3kv "),
    "--help": (["--help"], 0, "usage: p3kv"),
    "completion": (["--print-completion", "bash"], 0, "complete"),
    "run --help": (["run", "--help"], 0, "usage: p3kv run"),
    "doctor": (["doctor"], None, "this host:"),
    "trace": (["trace", "no-such-folder"], 2, "no-such-folder"),
    "plan": (["plan", "--help"], 0, "usage"),
    "compare": (["compare", "--help"], 0, "usage"),
    "top": (["top", "1"], 2, "process 1 belongs to no job of yours"),
    "launch": (
        ["launch", "-n", "1", "--", sys.executable, "-c", f"import p3kv; {SAYS_RANKS}"],
        None, "mine: DMLC_WORKER_ID MASTER_ADDR RANK WORLD_SIZE\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "inherited",
    [one if one == "ranks" else pytest.param(one, marks=pytest.mark.long) for one in INHERITED],
)
def test_commands_belong_to_no_job_whatever_they_inherit(inherited: str) -> None:
    env = environment(**INHERITED[inherited], P3KV_SECRET="", P3KV_RENDEZVOUS_TIMEOUT_S=20)
    # All the time limit is for the machine's other work: none of them waits for anything.
    with ThreadPoolExecutor(2) as pool:
        ended = dict(
            zip(COMMANDS, pool.map(lambda one: run([*P3KV, *one[0]], env, 60), COMMANDS.values()))
        )
    by_script = run([*SCRIPT, "--version"], env, 60)
    assert (by_script.code, by_script.output) == (0, ended["--version"].output)
    without = run(SCRIPT, env, 60)
    assert without.code == 2 and "run a whole job" in without.output
    for name, (_, code, words) in COMMANDS.items():
        said = ended[name].output
        assert words in said and (code is None or code == ended[name].code), f"{name}: {said}"
        assert "DMLC_PS_ROOT_URI is not set" not in said, f"{name}: {said}"
        assert "p3kv scheduler:" not in said and "p3kv worker:" not in said, f"{name}: {said}"


def test_run_takes_the_role_that_it_inherits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for command in (P3KV, SCRIPT):
        result = run([*command, "run", str(script)], environment(DMLC_ROLE="worker"), 60)
        assert result.code == 1
        assert "DMLC_PS_ROOT_URI is not set, but DMLC_ROLE=worker" in result.output


# Without standard streams.


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("name", ["--version", "doctor", "trace", "launch", "without a command"])
def test_commands_do_without_standard_streams(closed: str, name: str, tmp_path: Path) -> None:
    words, code = COMMANDS[name][:2] if name in COMMANDS else ([], 2)
    if name == "launch":
        done = f"open({str(tmp_path / 'done')!r}, 'w'); print('said')"
        words, code = ["launch", "-n", "1", "-s", "1", "--", *JOIN[:1], "-c"], 0
        words.append(f"import runpy, sys; runpy.run_path({JOIN[1]!r}); {done}")
    command = f"{shlex.join([*P3KV, *words])} {closed}"
    result = run(["bash", "-c", command], environment(**SUMS_ONLY), 60)
    assert "Traceback" not in result.output and "Bad file" not in result.output, result.output
    if code is not None:
        assert result.code == code, result.output
    if name == "launch":
        assert (tmp_path / "done").exists()
        assert ("said" in result.output) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize(
    ("where", "said", "code"),
    [
        ("| true", "", 141),
        ("> /dev/full", "p3kv doctor: can't write: No space left on device\n", 1),
    ],
)
def test_a_command_whose_output_nobody_takes_says_so_in_one_line(
    where: str, said: str, code: int
) -> None:
    command = f"{shlex.join([*P3KV, 'doctor'])} {where}; exit ${{PIPESTATUS[0]}}"
    result = run(["bash", "-c", command], environment(PYTHONUNBUFFERED=1), 60)
    assert (result.output, result.code) == (said, code)


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback() -> None:
    """Python's own start before that is not p3kv's."""
    interrupted = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == WHERE:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['p3kv', '--version']\n"
        "from p3kv.tools.cli import main\n"
        "sys.exit(main())\n"
    )
    for module in ("p3kv.errors", "msgspec", "p3kv.worker.worker", "p3kv.tools.commands.doctor"):
        code = interrupted.replace("WHERE", repr(module))
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_S
        )
        assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b""), module
