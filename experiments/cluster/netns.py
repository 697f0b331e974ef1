"""Network namespaces: act inside one, measure TCP between two, remove for sure what was made."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Sequence, TypeVar

_T = TypeVar("_T")
_NAMESPACES = Path("/var/run/netns")
_TCP_SETTINGS = Path("/proc/sys/net/ipv4")
_CLONE_NEWNET = 0x40000000
_TOOL_TIMEOUT_S = 30.0
_SOCKET_TIMEOUT_S = 5.0
_BUFFER_BYTES = 1 << 20


class ClusterError(RuntimeError):
    """A network could not be made, limited, measured or put back; the text says what to do."""


def tool_path(name: str) -> str | None:
    """Where the administration tool `name` (`ip`, `tc`) is, or None; looks beyond a user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def run_tool(name: str, *arguments: str, stdin: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Run `ip` or `tc` and return what it printed; raises ClusterError with the tool's complaint.

    `pass_fds` stay open in the tool: see `CleanupGuard.fileno`.
    """
    path = tool_path(name)
    if path is None:
        raise ClusterError(f"the command {name!r} is missing: install the package iproute2")
    command = " ".join([name, *arguments])
    try:
        done = subprocess.run(
            [path, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            pass_fds=tuple(pass_fds),
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{command!r} did not end within {_TOOL_TIMEOUT_S} s") from error
    if done.returncode != 0:
        complaint = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        given = "; given: " + stdin.strip().replace("\n", "; ") if stdin else ""
        raise ClusterError(f"{command!r} failed: {complaint}{given}")
    return done.stdout


def in_namespace(namespace: str | None, action: Callable[[], _T]) -> _T:
    """Return `action()`, run by a thread of its own inside `namespace`.

    None is a fresh namespace without a name, which goes with its last user. Sockets, files of
    `/proc/thread-self/net` and processes opened there belong to the namespace for their whole life,
    whichever thread uses them later. Raises what `action` raises, and ClusterError when the
    namespace cannot be entered.
    """

    def enter_and_act() -> _T:
        # Only this thread changes its namespace, and it ends here: nothing has to be changed back.
        libc = ctypes.CDLL(None, use_errno=True)
        if namespace is None:
            failed = libc.unshare(_CLONE_NEWNET)
        else:
            try:
                fd = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ClusterError(f"no network namespace {namespace}: {error.strerror}") from error
            try:
                failed = libc.setns(fd, _CLONE_NEWNET)
            finally:
                os.close(fd)
        if failed:
            reason = os.strerror(ctypes.get_errno())
            raise ClusterError(
                f"cannot enter network namespace {namespace or '(new)'}: {reason}; run as root"
            )
        return action()

    with ThreadPoolExecutor(1, thread_name_prefix="p3-netns") as pool:
        return pool.submit(enter_and_act).result()


def set_congestion_control(namespaces: Sequence[str], algorithm: str) -> None:
    """Make `algorithm` the default of TCP in each of `namespaces`.

    A namespace may only choose what the machine's first namespace allows everybody. Where that list
    lacks `algorithm`, it has it for the moment of the choice only: namespaces keep their choice.
    Raises ClusterError when the kernel lacks or refuses the algorithm.
    """
    allowed = _TCP_SETTINGS / "tcp_allowed_congestion_control"
    try:
        with contextlib.ExitStack() as stack:
            # Two clusters made at once must not put back each other's list in between.
            lock = os.open(_NAMESPACES, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = allowed.read_text().strip()
            if algorithm not in before.split():
                allowed.write_text(f"{before} {algorithm}")
                stack.callback(allowed.write_text, before)
            chosen = _TCP_SETTINGS / "tcp_congestion_control"
            for namespace in namespaces:
                in_namespace(namespace, lambda: chosen.write_text(algorithm))
    except OSError as error:
        available = (_TCP_SETTINGS / "tcp_available_congestion_control").read_text().strip()
        raise ClusterError(
            f"cannot use the TCP congestion control {algorithm!r} ({error.strerror}): this kernel "
            f"has {available}; load it with 'modprobe tcp_{algorithm}', or choose another"
        ) from error


class CleanupGuard:
    """A small process that runs a shell script when released or when this process has ended.

    It sees the end of this process however it comes (also by a signal that no handler can catch),
    so what the script removes is removed once, by one piece of code. It ignores the signals with
    which terminals and service managers end groups of processes.
    """

    _WAIT = "trap '' HUP INT TERM PIPE\nPATH=\"$PATH:/usr/sbin:/sbin\"\nread -r _\n"

    def __init__(self, script: str, *arguments: str) -> None:
        """Start the process; `script` finds `arguments` as "$@" and exits with 0 on success."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._WAIT + script, "cleanup", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )

    def fileno(self) -> int:
        """Whoever holds this descriptor open holds the script back.

        Pass it to a tool that makes what the script removes, lest the tool, alone for a moment
        after this process was killed, makes it after the script has run.
        """
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def release(self, timeout_s: float = 30.0) -> None:
        """Run the script now and wait for it; may be called twice.

        Raises ClusterError with the script's complaints when it fails or takes too long.
        """
        if self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            # A line, not only the end of the pipe: a forked child may hold the pipe open.
            _, complaints = self._process.communicate(b"\n", timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"the clean-up (process {self._process.pid}) still runs after {timeout_s} s; "
                f"look at 'ip netns list' and 'tc qdisc show'"
            ) from error
        if self._process.returncode != 0:
            text = " ".join(complaints.decode(errors="replace").split())
            raise ClusterError(
                f"the clean-up failed ({text or self._process.returncode}); "
                f"look at 'ip netns list' and 'tc qdisc show'"
            )


class InterfaceCounters:
    """Bytes that one interface inside a namespace has received and sent; one system call a reading.

    A packet that the kernel sends in one piece and cuts later (GSO) counts its headers once, so the
    figures are payload plus at most 1 percent, not what a cable would carry. Readings may come from
    any thread. The open file keeps the namespace alive: close it before the namespace is to go.
    """

    def __init__(self, namespace: str, interface: str) -> None:
        self._interface = interface.encode()
        self._fd = in_namespace(
            namespace, lambda: os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        )

    def read(self) -> tuple[int, int]:
        """(received, sent) bytes since the interface was made."""
        for line in os.pread(self._fd, 1 << 16, 0).splitlines():
            name, _, numbers = line.partition(b":")
            if name.strip() == self._interface:
                columns = numbers.split()
                return int(columns[0]), int(columns[8])
        raise ClusterError(f"the interface {self._interface.decode()} is gone")

    def close(self) -> None:
        """Let the namespace go; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def measure_goodput(
    sender: str, receiver: str, address: str, seconds: float, warm_up_s: float = 0.3
) -> float:
    """Payload in Mbit/s that one TCP connection carries from namespace `sender` to `receiver`.

    `address` is the receiver's. Bytes count where they arrive, for `seconds` after `warm_up_s`, so
    neither what buffers and idle links swallow nor slow start is in the figure. Returns a few
    seconds after that at the latest; raises ClusterError when nothing gets through.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(
                in_namespace(receiver, lambda: socket.create_server((address, 0), family=family))
            )
            source = stack.enter_context(in_namespace(sender, lambda: socket.socket(family)))
            listener.settimeout(_SOCKET_TIMEOUT_S)
            source.settimeout(_SOCKET_TIMEOUT_S)
            source.connect(listener.getsockname())
            sink = stack.enter_context(listener.accept()[0])
            sink.settimeout(_SOCKET_TIMEOUT_S)
            flood = threading.Thread(target=_flood, args=(source,), name="p3-goodput")
            flood.start()
            try:
                _drain(sink, warm_up_s)
                begin = time.monotonic()
                received_bytes = _drain(sink, seconds)
                elapsed_s = time.monotonic() - begin
            finally:
                # Ends a send at once; closing the socket under the thread would not.
                source.shutdown(socket.SHUT_RDWR)
                flood.join()
        except OSError as error:
            raise ClusterError(
                f"no TCP from {sender} to {receiver} ({address}): {error}"
            ) from error
    return received_bytes * 8e-6 / elapsed_s


def _flood(source: socket.socket) -> None:
    payload = bytes(_BUFFER_BYTES)
    with contextlib.suppress(OSError):  # the receiver has what it wants and shut the connection
        while True:
            source.sendall(payload)


def _drain(sink: socket.socket, seconds: float) -> int:
    buffer = bytearray(_BUFFER_BYTES)
    deadline = time.monotonic() + seconds
    received_bytes = 0
    while time.monotonic() < deadline:
        count = sink.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender closed the connection")
        received_bytes += count
    return received_bytes
