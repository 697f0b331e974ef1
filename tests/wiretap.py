"""A proxy between workers and servers that records what passes, or puts itself in the middle."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from types import TracebackType
from typing import List, Optional, Type

from tests.jobs import ROOT, SCRIPTS

_SILENCE_S = 60.0


class Wiretap:
    """Hears all connections of jobs that have its `settings`."""

    def __init__(self, context: Optional[ssl.SSLContext] = None) -> None:
        """With a context of TLS, it takes the servers' place, as far as workers let it."""
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: List[socket.socket] = []
        self._threads: List[threading.Thread] = []
        self.to_servers: List[bytes] = []
        """What each connection has brought to a server."""
        self.to_workers: List[bytes] = []
        self.intercepted = 0
        """Connections on which a worker has taken it for a server."""
        self.settings = {
            "P3KV_PLUGINS": "by_wiretap",
            "P3KV_TRANSPORT": "by_wiretap",
            "PYTHONPATH": f"{ROOT}:{SCRIPTS}",
            "TEST_WIRETAP": self._listener.getsockname()[1],
        }

    def __enter__(self) -> Wiretap:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _start(self, target, *arguments) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                near = self._listener.accept()[0]
                near.settimeout(_SILENCE_S)
                self._ends.append(near)
                self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        host, port = self._line(near).split()
        far = socket.create_connection((host.decode(), int(port)), _SILENCE_S)
        self._ends.append(far)
        if self._context is not None:
            with suppress(OSError):
                near = self._context.wrap_socket(near, server_side=True)
                self._ends.append(near)
                near.recv(1)  # a worker that takes it for a server says hello
                self.intercepted += 1
            return
        self._start(self._carry, near, far, self.to_servers)
        self._start(self._carry, far, near, self.to_workers)

    def _line(self, near: socket.socket) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += near.recv(1)
        return line

    def _carry(self, source: socket.socket, target: socket.socket, heard: List[bytes]) -> None:
        passed = bytearray()
        with suppress(OSError):
            while data := source.recv(65536):
                passed += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        heard.append(bytes(passed))
