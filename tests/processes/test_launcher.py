"""The launcher: real processes, trivial commands; and the command line around it.

Most jobs here are made of shell commands instead of p3kv's roles, since what is tested is how
processes are started, watched and ended.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from p3kv.processes.launcher import Graces, JobPart, Launcher, job_parts, launch
from p3kv.processes.launcher.output import LineSplitter, Screen, Text
from p3kv.processes.launcher.parts import on_this_host, with_descriptors
from p3kv.wire.launcher_link import Cause, LauncherLink, PartEnded
from tests.jobs import eventually

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0
SOON_S = 30.0
"""Half as long as what a launcher waits for, in tests in which it must not wait."""
SHORT = Graces(others_s=0.5, serving_s=0.5, term_s=0.5)


def clean_environment(**more):
    """This process's environment without what would make p3kv take a place in a job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "P3KV_"))}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, **more}


def shell(name, script, **more):
    return JobPart(name, ("sh", "-c", script), clean_environment(), **more)


class LaunchedJob:
    """What a finished Launcher left: `code`, `out` and `err` as text, `took_s`."""

    def __init__(self, *parts, graces=SHORT, **more):
        out, err = io.BytesIO(), io.BytesIO()
        start_s = time.monotonic()
        self.code = Launcher(parts, out=out, err=err, graces=graces, **more).run()
        self.took_s = time.monotonic() - start_s
        self.out, self.err = out.getvalue().decode(), err.getvalue().decode()
        self.last_line = self.err.splitlines()[-1] if self.err else ""


def is_running(pid):
    """Zombies do not count: in a container nobody may be there to reap them."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_in(folder, count):
    """The process numbers that `count` processes have written into files of `folder`."""
    eventually(lambda: sum(bool(file.read_text()) for file in folder.iterdir()) == count)
    return [int(file.read_text()) for file in folder.iterdir()]


# A leader and a child that the leader leaves alone, each with its number in a file.
def family(folder, name):
    return f"sleep 60 & echo $! > {folder}/{name}-child; echo $$ > {folder}/{name}; wait"


def start_launcher(*scripts, term_s=5.0, stop_s=30.0):
    """Starts a launcher of shell scripts in a process of its own; returns that process."""
    program = (
        "import os, sys\n"
        "from p3kv.processes.launcher import Graces, Launcher, JobPart\n"
        "parts = [JobPart(f'part {i}', ('sh', '-c', s), os.environ)"
        " for i, s in enumerate(sys.argv[1:])]\n"
        f"sys.exit(Launcher(parts, graces=Graces(term_s={term_s}, stop_s={stop_s})).run())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *scripts],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def p3kv(*arguments, **more):
    """Runs the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "p3kv", *map(str, arguments)],
        **{"env": clean_environment(), **more},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


# A scheduler that says what it was told of ends, then the given causes, and fails.
SCHEDULER = """
import socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
if sys.argv[2] == "hear":
    print(link.recv(4096).decode(), end="")
link.sendall(sys.argv[3].encode())
sys.exit(1)
"""


def job_with_a_scheduler(causes, *parts, hear=False, graces=None):
    ours, theirs = socket.socketpair()
    words = "".join(msgspec.json.encode(cause).decode() + "\n" for cause in causes)
    scheduler = JobPart(
        "scheduler",
        (sys.executable, "-c", SCHEDULER, str(theirs.fileno()), "hear" if hear else "", words),
        clean_environment(),
        serves_workers=True,
        pass_fds=(theirs.fileno(),),
    )
    graces = graces or Graces(others_s=10)
    with ours, theirs:
        link = LauncherLink(ours, Cause)
        return LaunchedJob(scheduler, *parts, link=link, handed_over=[theirs], graces=graces)


class TestLink:
    @pytest.mark.parametrize(
        ("script", "end"),
        [
            ("exit 3", PartEnded("worker", 1, 3)),
            ("true", PartEnded("worker", 1, 0)),
            ("kill -KILL $$", PartEnded("worker", 1, 137, "SIGKILL")),
        ],
    )
    def test_the_scheduler_is_told_how_a_part_ended(self, script, end):
        job = job_with_a_scheduler([], shell("worker 1", script), hear=True)
        told = job.out.partition("| ")[2].encode()
        assert msgspec.json.decode(told, type=PartEnded) == end

    def test_both_ends_live_without_the_other(self):
        ours, theirs = socket.socketpair()
        link = LauncherLink(ours, PartEnded)
        theirs.sendall(b'{"type":"PartEnded","role":"server","rank":0,"code":1}\n{"type":')
        assert link.receive() == [PartEnded("server", 0, 1)]
        theirs.close()
        assert link.receive() == []
        link.send(PartEnded("server", 0, 1))
        link.close()


class TestExitCode:
    def test_is_0_when_all_parts_end_well(self):
        job = LaunchedJob(shell("a", "true"), shell("b", "true"))
        assert (job.code, job.err) == (0, "")

    def test_is_that_of_the_first_part_to_fail(self):
        parts = (shell("a", "sleep 1; exit 4"), shell("b", "exit 3"), shell("c", "true"))
        job = LaunchedJob(*parts, graces=Graces(others_s=DEADLINE_S))
        assert job.code == 3
        assert job.last_line == "p3kv launch: b failed first: exit code 3"

    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    def test_is_128_and_the_signal_for_a_part_killed_by_one(self, signum):
        job = LaunchedJob(shell("a", f"kill -{int(signum)} $$"))
        assert job.code == 128 + signum
        assert job.last_line == f"p3kv launch: a failed first: killed by {signum.name}"

    def test_is_that_of_the_part_that_made_the_others_fail_when_they_end_before_it(self):
        cause = Cause("worker 0", "worker 0 failed first: why", [])
        job = job_with_a_scheduler([cause], shell("worker 0", "sleep 0.3; exit 5"))
        assert job.code == 5
        assert job.last_line == "p3kv launch: worker 0 failed first: why"

    @pytest.mark.parametrize("part", ["worker 1", "worker 7", "scheduler"])
    def test_is_1_when_the_one_that_is_blamed_has_none_of_its_own(self, part):
        cause = Cause(part, "the reason", [])
        workers = shell("worker 0", "sleep 0.3; exit 5"), shell("worker 1", "true")
        job = job_with_a_scheduler([cause], *workers)
        assert (job.code, job.last_line) == (1, "p3kv launch: the reason")

    def test_is_not_that_of_a_part_that_the_launcher_ended(self):
        cause = Cause("worker 0", "the reason", [])
        graces = Graces(others_s=0.5)
        job = job_with_a_scheduler([cause], shell("worker 0", "sleep 60"), graces=graces)
        assert (job.code, job.last_line) == (1, "p3kv launch: the reason; ended worker 0")

    def test_is_1_when_parts_that_can_t_be_told_are_ended_at_once(self):
        cause = Cause("worker 0", "the reason", unreached=["worker 0", "server 0"])
        parts = shell("worker 0", "true"), shell("server 0", "sleep 60", serves_workers=True)
        job = job_with_a_scheduler([cause], *parts, graces=Graces(others_s=60, serving_s=60))
        assert (job.code, job.last_line) == (1, "p3kv launch: the reason")
        assert job.took_s < SOON_S

    def test_is_known_soon_when_the_one_that_is_blamed_is_stopped(self):
        cause = Cause("worker 0", "the reason", unreached=["worker 0"])
        stopped = shell("worker 0", "kill -STOP $$")
        job = job_with_a_scheduler([cause], stopped, graces=Graces(others_s=60))
        assert (job.code, job.last_line) == (1, "p3kv launch: the reason")
        assert job.took_s < SOON_S

    def test_is_known_soon_when_only_the_scheduler_is_left_and_tells_nothing(self):
        ours, theirs = socket.socketpair()
        scheduler = shell("scheduler", "kill -STOP $$", serves_workers=True)
        with ours, theirs:
            job = LaunchedJob(
                scheduler,
                shell("worker 0", "exit 1"),
                link=LauncherLink(ours, Cause),
                handed_over=[theirs],
                graces=Graces(others_s=60, scheduler_s=0.3),
            )
        assert (job.code, job.last_line) == (
            1,
            "p3kv launch: scheduler failed first: it answered nobody any more; ended scheduler",
        )
        assert job.took_s < SOON_S

    def test_is_127_for_a_command_that_does_not_exist_and_nothing_starts(self, tmp_path):
        missing = JobPart("b", ("no-such-command",), clean_environment())
        job = LaunchedJob(shell("a", f"touch {tmp_path}/started"), missing)
        assert job.code == 127
        assert job.last_line == (
            "p3kv launch: cannot start b: the command 'no-such-command' was not found"
        )
        assert list(tmp_path.iterdir()) == []

    def test_is_126_for_a_command_that_is_not_executable(self, tmp_path):
        file = tmp_path / "train.py"
        file.write_text("print('hello')")
        job = LaunchedJob(JobPart("a", (str(file),), clean_environment()))
        assert job.code == 126
        assert "is not executable" in job.last_line

    def test_is_127_when_the_command_names_a_missing_interpreter(self, tmp_path):
        file = tmp_path / "train.py"
        file.write_text("#!/no/such/python\n")
        file.chmod(0o755)
        job = LaunchedJob(shell("a", "sleep 60"), JobPart("b", (str(file),), clean_environment()))
        assert job.code == 127
        assert job.last_line.startswith("p3kv launch: cannot start b: ")
        assert job.last_line.endswith("; ended a")


class TestEnding:
    def test_others_may_say_why_they_end_when_one_part_fails(self):
        job = LaunchedJob(
            shell("a", "exit 3"),
            shell("b", "sleep 0.3; echo peer lost >&2; exit 1"),
            graces=Graces(others_s=60),
        )
        assert job.code == 3
        assert "b | peer lost" in job.err
        assert job.took_s < SOON_S

    def test_others_are_ended_when_they_take_too_long(self):
        job = LaunchedJob(shell("a", "exit 3"), shell("b", "sleep 60"))
        assert job.code == 3
        assert job.last_line == "p3kv launch: a failed first: exit code 3; ended b"
        assert job.took_s < SOON_S

    def test_a_part_that_ignores_sigterm_is_killed(self):
        job = LaunchedJob(
            shell("a", "exit 3"), shell("b", "trap '' TERM; while :; do sleep 0.1; done")
        )
        assert job.code == 3
        assert job.took_s < SOON_S

    def test_what_a_part_leaves_behind_ends_with_it(self, tmp_path):
        script = f"(trap '' TERM; sleep 60) & echo $! > {tmp_path}/child"
        job = LaunchedJob(shell("a", script))
        assert job.code == 0
        assert job.took_s < SOON_S
        assert not any(map(is_running, pids_in(tmp_path, 1)))

    def test_servers_that_wait_for_workers_that_ended_are_ended(self):
        serving = shell("server 0", "sleep 60", serves_workers=True)
        job = LaunchedJob(shell("worker 0", "true"), serving)
        assert job.code == 1
        assert "does every worker import p3kv" in job.last_line
        assert job.last_line.endswith("; ended server 0")

    def test_a_server_that_misses_the_workers_makes_one_ask_whether_they_used_it(self):
        serving = shell("server 0", "sleep 0.3; exit 1", serves_workers=True)
        job = LaunchedJob(shell("worker 0", "true"), serving, graces=Graces(serving_s=10))
        assert job.code == 1
        assert job.last_line == (
            "p3kv launch: server 0 failed first: exit code 1, after the workers ended well; "
            "does every worker import p3kv?"
        )

    def test_servers_that_end_after_their_workers_are_waited_for(self):
        serving = shell("server 0", "sleep 0.3; echo done", serves_workers=True)
        job = LaunchedJob(shell("worker 0", "true"), serving, graces=Graces(serving_s=10))
        assert job.code == 0
        assert "server 0 | done" in job.out

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_to_the_launcher_leaves_no_process(self, signum, tmp_path):
        launcher = start_launcher(family(tmp_path, "a"), family(tmp_path, "b"))
        pids = pids_in(tmp_path, 4)
        launcher.send_signal(signum)
        output, _ = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 128 + signum
        assert output.splitlines()[-1] == f"p3kv launch: stopped by {signum.name}"
        assert not any(map(is_running, pids))

    def test_a_second_ctrl_c_does_not_wait(self, tmp_path):
        stubborn = f"trap '' TERM INT; echo $$ > {tmp_path}/a; while :; do sleep 0.1; done"
        launcher = start_launcher(stubborn, term_s=60.0)
        pids = pids_in(tmp_path, 1)
        launcher.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(timeout=0.5)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 128 + signal.SIGINT
        assert not any(map(is_running, pids))

    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_goes_to_scripts_alone_and_what_serves_them_goes_on(self, signum, tmp_path):
        saving = (
            "import os, signal, subprocess, sys\n"
            "signal.signal(signal.Signals[sys.argv[2]], lambda *_: None)\n"
            "helper = subprocess.Popen(['sleep', '60'])\n"
            "open(sys.argv[1], 'w').write(str(helper.pid))\n"
            "signal.pause()\n"
            "assert helper.poll() is None\n"
            "print('saved')\n"
        )
        (tmp_path / "script").write_text(saving)
        # A shell that does not handle the signal would leave its script alone.
        script = f"{sys.executable} {tmp_path}/script {tmp_path}/helper {signum.name}; echo next"
        until = f"until [ -e {tmp_path}/end ]; do sleep 1; done"
        served = f"trap 'echo asked' {signum.name[3:]}; {until}"
        program = (
            "import os, sys\n"
            "from p3kv.processes.launcher import Graces, Launcher, JobPart\n"
            "parts = [JobPart('server 0', ('sh', '-c', sys.argv[2]), os.environ, True),"
            " JobPart('worker 0', ('sh', '-c', sys.argv[1]), os.environ)]\n"
            "sys.exit(Launcher(parts).run())"
        )
        launcher = subprocess.Popen(
            [sys.executable, "-c", program, script, served],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        eventually(lambda: (tmp_path / "helper").exists() and (tmp_path / "helper").read_text())
        launcher.send_signal(signum)
        lines = [launcher.stdout.readline() for _ in range(3)]
        (tmp_path / "end").touch()
        output = "".join(lines) + launcher.communicate(timeout=DEADLINE_S)[0]
        assert "worker 0 | saved\nworker 0 | next\n" in output
        assert "asked" not in output
        assert f"has passed {signum.name} on to the scripts, which have 30 s" in output
        assert output.splitlines()[-1] == f"p3kv launch: stopped by {signum.name}"
        assert launcher.returncode == 128 + signum

    def test_scripts_that_take_too_long_after_a_signal_are_ended(self, tmp_path):
        stubborn = f"trap '' INT; echo $$ > {tmp_path}/a; while :; do sleep 0.1; done"
        launcher = start_launcher(stubborn, stop_s=0.5)
        pids = pids_in(tmp_path, 1)
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=SOON_S)
        assert output.splitlines()[-1] == "p3kv launch: stopped by SIGINT; ended part 0"
        assert launcher.returncode == 128 + signal.SIGINT
        assert not any(map(is_running, pids))

    def test_a_job_that_was_stopped_while_it_failed_may_not_start_again(self):
        launcher = Launcher([shell("a", "exit 3"), shell("b", "sleep 60")], graces=SHORT)

        def stop() -> None:
            eventually(lambda: launcher._verdict is not None)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop).start()
        assert launcher.run() == 3
        assert not launcher.a_part_failed

    def test_nothing_survives_a_launcher_that_is_killed(self, tmp_path):
        stubborn = f"trap '' TERM; echo $$ > {tmp_path}/a; while :; do sleep 0.1; done"
        launcher = start_launcher(stubborn, family(tmp_path, "b"), term_s=0.5)
        pids = pids_in(tmp_path, 3)
        launcher.kill()
        output, _ = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == -signal.SIGKILL
        eventually(lambda: not any(map(is_running, pids)))
        assert "the launcher was killed; ending its processes" in output

    def test_the_job_ends_when_nobody_reads_its_output(self, tmp_path):
        noisy = f"echo $$ > {tmp_path}/a; while :; do echo y; sleep 0.01; done"
        launcher = start_launcher(noisy)
        pids = pids_in(tmp_path, 1)
        launcher.stdout.close()
        assert launcher.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
        assert not any(map(is_running, pids))


class TestOutput:
    def test_lines_carry_the_name_of_their_writer_aligned(self):
        job = LaunchedJob(
            shell("scheduler", "echo one; echo two >&2"),
            shell("worker 0", "printf 'no newline'"),
        )
        assert sorted(job.out.splitlines()) == ["scheduler | one", "worker 0  | no newline"]
        assert job.err == "scheduler | two\n"

    def test_lines_of_different_writers_do_not_mix(self):
        script = "for i in $(seq 300); do printf 'a%s' $i; printf 'b\\n'; done"
        job = LaunchedJob(shell("x", script), shell("y", script))
        for name in "xy":
            lines = [line for line in job.out.splitlines() if line.startswith(name)]
            assert lines == [f"{name} | a{i}b" for i in range(1, 301)]

    def test_bytes_that_are_no_text_pass_unchanged(self):
        out = io.BytesIO()
        Launcher([shell("a", "printf '\\377\\n'")], out=out, err=out).run()
        assert out.getvalue() == b"a | \xff\n"

    def test_a_progress_bar_in_a_file_leaves_its_last_state(self):
        job = LaunchedJob(
            shell("a", "for i in 1 2 3; do printf '\\r%s %%' $i; sleep 0.05; done; echo")
        )
        assert job.out == "a | 3 %\n"

    def test_nobody_gets_the_launchers_input(self):
        job = LaunchedJob(shell("a", "cat; echo end"))
        assert job.out == "a | end\n"

    @pytest.mark.parametrize("colours", [True, False])
    def test_progress_on_a_terminal_stays_below_the_lines(self, colours, monkeypatch):
        class Terminal(io.BytesIO):
            def isatty(self):
                return True

        monkeypatch.setenv("NO_COLOR", "" if colours else "1")
        terminal = Terminal()
        screen = Screen(terminal, terminal)
        screen.show(True, "w0", 0, [Text(b"1 %", False)])
        screen.show(False, "w1", 1, [Text(b"hello", True)])
        screen.show(True, "w0", 0, [Text(b"2 %", True)])
        screen.say("end")
        w0, w1, erase = "\033[32mw0 | \033[0m", "\033[36mw1 | \033[0m", "\r\033[K"
        if not colours:
            w0, w1 = "w0 | ", "w1 | "
        assert terminal.getvalue().decode() == (
            f"{w0}1 %{erase}{w1}hello\n{w0}1 %{erase}{w0}2 %\nend\n"
        )

    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_why_a_job_fails_is_shown_once_and_then_who_has_said_the_same(
        self, is_terminal, monkeypatch
    ):
        class Stream(io.BytesIO):
            def isatty(self):
                return is_terminal

        monkeypatch.setenv("NO_COLOR", "1")
        stream = Stream()
        screen = Screen(stream, stream)
        said = [
            ("server 1 ", b"p3kv server 1: the optimizer failed"),
            ("worker 0 ", b"epoch 1"),
            ("worker 0 ", b"p3kv worker: server 1: the optimizer failed"),
            ("worker 1 ", b"epoch 1"),
            ("worker 1 ", b"p3kv worker: server 1: the optimizer failed"),
            ("scheduler", b"p3kv scheduler: worker 1: it is silent"),
        ]
        for name, line in said:
            screen.show(True, name, 0, [Text(line, True)])
        screen.say_what_is_folded()
        lines = stream.getvalue().decode().splitlines()
        every = [f"{name} | {line.decode()}" for name, line in said]
        del every[4], every[2]
        every.append("p3kv launch: worker 0, worker 1 said the same as server 1")
        assert lines == every

    @pytest.mark.parametrize(
        ("pieces", "expected"),
        [
            ([b"a\nb\n"], [Text(b"a", True), Text(b"b", True)]),
            ([b"a", b"b\n"], [Text(b"ab", True)]),
            ([b"a\r\n"], [Text(b"a", True)]),
            ([b"a\r", b"\n"], [Text(b"a", False), Text(b"a", True)]),
            ([b"\r1", b"\r2", b"\n"], [Text(b"1", False), Text(b"2", False), Text(b"2", True)]),
            ([b"1\r2\r", b"3\r"], [Text(b"2", False), Text(b"3", False), Text(b"3", True)]),
            ([b"\r1\nplain"], [Text(b"1", True), Text(b"plain", True)]),
            ([b"\n\n"], [Text(b"", True), Text(b"", True)]),
            ([], []),
        ],
    )
    def test_a_carriage_return_makes_progress_and_a_newline_a_line(self, pieces, expected):
        splitter = LineSplitter()
        texts = [text for piece in pieces for text in splitter.feed(piece)]
        assert texts + splitter.end() == expected


class TestJobParts:
    def parts(self, **environment):
        parts = job_parts(["python", "train.py"], 2, 3, port=9, env=dict(environment))
        return with_descriptors(on_this_host(parts), scheduler_fd=7, launcher_fd=8)

    def test_are_a_scheduler_and_all_servers_and_workers_with_their_ranks(self):
        scheduler, *others = self.parts()
        assert [part.name for part in others] == [
            *("server 0", "server 1", "server 2"),
            *("worker 0", "worker 1"),
        ]
        assert (scheduler.env["DMLC_ROLE"], scheduler.pass_fds) == ("scheduler", (7, 8))
        assert scheduler.env["P3KV_SCHEDULER_FD"] == "7"
        assert scheduler.env["P3KV_LAUNCHER_FD"] == "8"
        assert not any("P3KV_LAUNCHER_FD" in part.env for part in others)
        assert all(part.env["P3KV_LAUNCHED"] == "1" for part in (scheduler, *others))
        assert [part.env.get("DMLC_SERVER_ID") for part in others] == ["0", "1", "2", None, None]
        assert [part.env.get("DMLC_WORKER_ID") for part in others] == [*[None] * 3, "0", "1"]
        assert others[-1].argv == ("python", "train.py")
        assert others[0].argv == (sys.executable, "-m", "p3kv")
        assert [part.serves_workers for part in others] == [True] * 3 + [False] * 2

    def test_agree_on_the_job(self):
        parts = self.parts()
        for name, value in {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "9",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "3",
        }.items():
            assert {part.env[name] for part in parts} == {value}
        assert len({part.env["P3KV_JOB"] for part in parts}) == 1
        assert parts[0].env["P3KV_JOB"] != self.parts()[0].env["P3KV_JOB"]

    def test_get_the_whole_environment_but_no_other_processs_rank(self):
        parts = self.parts(MINE="kept", OMP_NUM_THREADS="9", DMLC_WORKER_ID="5", DMLC_ROLE="x")
        assert {part.env["MINE"] for part in parts} == {"kept"}
        assert {part.env["OMP_NUM_THREADS"] for part in parts} == {"9"}
        assert "DMLC_WORKER_ID" not in parts[0].env
        assert parts[-1].env["DMLC_WORKER_ID"] == "1"

    def test_see_the_environment_in_the_real_process(self):
        parts = job_parts(
            ["sh", "-c", 'echo "$MINE $DMLC_ROLE $DMLC_WORKER_ID"'],
            2,
            1,
            port=9,
            env=clean_environment(MINE="kept"),
        )
        job = LaunchedJob(*(part for part in parts if not part.serves_workers))
        assert sorted(job.out.splitlines()) == [
            "worker 0 | kept worker 0",
            "worker 1 | kept worker 1",
        ]


class TestCommandLine:
    def test_tells_the_version(self):
        result = p3kv("--version")
        assert (result.returncode, result.stdout) == (0, "p3kv 0.1.0\n")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["launch", "-n", "0", "--", "true"], "0 is not 1 or more"),
            (["launch", "-n", "two", "--", "true"], "'two' is not a whole number"),
            (["launch", "-n", "1", "-s", "1.5", "--", "true"], "'1.5' is not a whole number"),
            (["launch", "-n", "1", "--root-port", "x", "--", "true"], "'x' is not a whole number"),
            (["launch", "--", "true"], "-n/--num-workers"),
            (["launch", "-n", "1", "--"], "the workers' command is missing"),
            (["launch", "-n", "1", "--root-port", "70000", "--", "true"], "70000 is not a port"),
            ([], "COMMAND"),
        ],
    )
    def test_refuses_wrong_arguments_with_a_reason(self, arguments, message):
        result = p3kv(*arguments)
        assert result.returncode == 2
        assert message in result.stderr

    @pytest.mark.parametrize("dashes", [["--"], []])
    def test_passes_the_workers_command_on_whole(self, dashes, monkeypatch):
        import p3kv.processes.launcher
        from p3kv.tools import cli

        calls = []
        monkeypatch.setattr(
            p3kv.processes.launcher, "launch", lambda *args, **more: calls.append((args, more)) or 5
        )
        command = ["python", "train.py", "-n", "3", "--", "x"]
        assert cli.main(["launch", "-n", "2", "--root-port", "9", *dashes, *command]) == 5
        more = {"root_port": 9, "resume": False, "restarts": 0}
        assert calls == [((command, 2, 2), more)]

    def test_launch_of_an_unknown_command_exits_127(self):
        result = p3kv("launch", "-n", "1", "-s", "1", "--", "no-such-command")
        assert result.returncode == 127
        assert result.stderr == (
            "p3kv launch: cannot start worker 0: the command 'no-such-command' was not found\n"
        )

    def test_launch_on_a_port_that_is_taken_says_so(self):
        err = io.BytesIO()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            assert launch(["true"], 1, 1, root_port=port, err=err) == 1
        assert f"port {port} of 127.0.0.1 is not free".encode() in err.getvalue()

    def test_run_runs_a_script_as_python_does(self, tmp_path):
        (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
        script = tmp_path / "train.py"
        script.write_text(
            "import sys, neighbour\n"
            "assert __name__ == '__main__' and __file__ == sys.argv[0]\n"
            "assert 'p3kv' in sys.modules\n"
            "print(neighbour.NAME, sys.argv[1:], sys.path[0])\n"
            "sys.exit(7)\n"
        )
        result = p3kv("run", script, "--epochs", "3", "--help", cwd=REPOSITORY)
        assert result.returncode == 7, result.stderr
        assert result.stdout == f"neighbour ['--epochs', '3', '--help'] {tmp_path}\n"

    def test_run_of_a_missing_script_says_so(self, tmp_path):
        result = p3kv("run", tmp_path / "train.py")
        assert result.returncode == 2
        assert result.stderr == f"p3kv run: there is no script '{tmp_path}/train.py'\n"

    def test_run_of_a_folder_says_so(self, tmp_path):
        result = p3kv("run", tmp_path)
        assert result.returncode == 2
        assert result.stderr == f"p3kv run: can't read '{tmp_path}': Is a directory\n"

    def test_launch_with_a_wrong_setting_says_so_once(self):
        env = clean_environment(P3KV_SLICE_SIZE="abc")
        result = p3kv("launch", "-n", "2", "--", "true", env=env)
        assert result.returncode == 2
        assert result.stderr == (
            "p3kv launch: slice_size (P3KV_SLICE_SIZE) is 'abc'; "
            "it must be a whole number from 1 to 268435456\n"
        )

    def test_launch_of_a_script_without_python_says_how(self, tmp_path):
        script = tmp_path / "train.py"
        script.write_text("import p3kv")
        result = p3kv("launch", "-n", "2", "--", script)
        assert result.returncode == 126
        assert result.stderr.endswith(f"is not executable; is it 'python {script}'?\n")
