"""Faults for jobs of real processes: processes that stop, links that stall, disks that are full.

Links of whole hosts are cut, slowed and made to lose packets by `experiments.cluster.Cluster`, and
`TrainingJob.parts` has the processes to kill.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Set

import psutil
import pytest

from tests.jobs import DEADLINE_S, eventually

CHUNK_BYTES = 1 << 14
_ON_THE_WAY = 64
"""Chunks of a direction that the proxy keeps at a time."""
_STEP_S = 0.01
_RESET = struct.pack("ii", 1, 0)


def rounds(folder: Path) -> int:
    """How many rounds worker 0 of a job of `enduring.py` has made."""
    file = folder / "rounds"
    return int(file.read_text()) if file.exists() else 0


def goes_on(folder: Path, timeout_s: float = DEADLINE_S) -> float:
    """Returns after how many seconds a job of `enduring.py` has made 20 rounds more."""
    before, start = rounds(folder), time.monotonic()
    eventually(lambda: rounds(folder) > before + 20, timeout_s)
    return time.monotonic() - start


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Processes of anybody do nothing, and are there, until the context ends."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A disk of its own at `folder`, which is made; whatever has a file open may outlive it. Skips
    the test without root."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir()
    options = f"size={size_bytes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leaves no room on the disk of `folder`."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError as error:
            assert error.errno == errno.ENOSPC


class Proxy:
    """Data connections of a job go through it while it is entered, and their bytes as it says.

    It records them. With a context of TLS it takes the servers' place instead, as far as workers
    let it.

    `settings` are those of the job's processes. Everything may be changed and called from any
    thread, at any time.
    """

    def __init__(self, context: Optional[ssl.SSLContext] = None) -> None:
        self._context = context
        self.delay_s = 0.0
        """How late bytes arrive, in each direction."""
        self.rate_bytes_s: Optional[float] = None
        """How many bytes a connection carries in each direction."""
        self.flips_after_bytes: Optional[int] = None
        """How much of a connection reaches the server as it is; then a bit of each chunk is
        changed."""
        self.to_servers: List[bytearray] = []
        """What each connection has brought to a server."""
        self.to_workers: List[bytearray] = []
        self.intercepted = 0
        """Connections on which a worker has taken it for a server."""
        self._holds = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._tasks: Set[asyncio.Task] = set()
        self._writers: List[asyncio.StreamWriter] = []
        self._stack = ExitStack()
        self.settings: Dict[str, object] = {}

    def __enter__(self) -> Proxy:
        self._thread.start()
        port = self._call(self._listen(self._register))
        self.settings = {
            "P3KV_TRANSPORT": "by_proxy",
            "P3KV_PLUGINS": "by_proxy",
            "TEST_PROXY": f"127.0.0.1:{port}",
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No byte arrives, and nobody is told, until the context ends."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    @property
    def passed_bytes(self) -> int:
        """How many bytes have passed, in both directions."""
        return sum(map(len, [*self.to_servers, *self.to_workers]))

    def reset(self) -> int:
        """Resets all connections on both sides, and returns how many there were; bytes that were
        on their way are lost. New ones are let in."""
        return self._call(self._reset())

    def _call(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=DEADLINE_S)

    async def _listen(self, handler, context=None) -> int:  # type: ignore[no-untyped-def]
        server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=context)
        self._stack.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A server says where it listens, and hears where its workers will come."""
        host, port = (await reader.readline()).decode().split()

        async def link(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
            if self._context is not None:  # and the handshake is over
                self.intercepted += 1
                back.close()
                return
            far, on = await asyncio.open_connection(host, int(port))
            self._writers += [back, on]
            for source, target, streams in (
                (near, on, self.to_servers), (far, back, self.to_workers),
            ):  # fmt: skip
                streams.append(bytearray())
                task = asyncio.ensure_future(self._pass_on(source, target, streams[-1]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        writer.write(b"%d\n" % await self._listen(link, self._context))
        await writer.drain()
        writer.close()

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, passed: bytearray
    ) -> None:
        """Passes bytes on until one side ends, and ends the other; `passed` grows by them."""
        on_the_way: asyncio.Queue = asyncio.Queue(_ON_THE_WAY)

        async def take() -> None:
            with suppress(OSError):
                while chunk := await source.read(CHUNK_BYTES):
                    await on_the_way.put((self._loop.time(), chunk))
            await on_the_way.put((self._loop.time(), b""))

        taking = asyncio.ensure_future(take())
        try:
            while True:
                since, chunk = await on_the_way.get()
                while self._holds or self._loop.time() < since + self.delay_s:
                    await asyncio.sleep(_STEP_S)
                if not chunk:
                    break
                if self.rate_bytes_s is not None:
                    await asyncio.sleep(len(chunk) / self.rate_bytes_s)
                to_server = any(passed is stream for stream in self.to_servers)
                target.write(self._changed(chunk, len(passed)) if to_server else chunk)
                passed += chunk
                await target.drain()
        except OSError:  # the target has gone
            pass
        finally:
            taking.cancel()
            target.close()

    def _changed(self, chunk: bytes, passed_bytes: int) -> bytes:
        if self.flips_after_bytes is None:
            return chunk
        first = max(0, self.flips_after_bytes - passed_bytes)
        if first >= len(chunk):
            return chunk
        return chunk[:first] + bytes([chunk[first] ^ 1]) + chunk[first + 1 :]

    async def _reset(self) -> int:
        writers, self._writers = self._writers, []
        living = [writer for writer in writers if not writer.transport.is_closing()]
        for writer in living:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        return len(living) // 2

    async def _end(self) -> None:
        self._stack.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
