"""The command line as users see it: help, errors, completion."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List

import pytest

from p3kv import cli
from tests.jobs import DEADLINE_S, environment, run

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
