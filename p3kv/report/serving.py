"""Answers HTTP requests with few connections, whoever asks, and however slowly."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import threading
from http.client import HTTPException, parse_headers
from typing import Any, Callable, Dict, List, Tuple
from urllib.parse import urlsplit

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 32
"""With one more, the oldest is closed: whoever means to ask has done so by then."""
_BACKLOG = 16
"""How many connections come at most in one turn, before the oldest are closed."""
_DEADLINE_S = 5.0
"""For a request and its answer."""
_MOST_REQUEST_BYTES = 8192
_BROKEN = (
    OSError, EOFError, ValueError, HTTPException, asyncio.TimeoutError, asyncio.LimitOverrunError
)  # fmt: skip
"""Errors that come of a peer that goes, asks for nothing in time, or asks in another language."""


class Serving:
    """Answers GET requests by a WSGI application, from a thread of its own, until `close`.

    The job's files and connections need descriptors, and anybody who reaches the port may open
    connections: so these are few, and none stays open longer than its deadline.
    """

    def __init__(self, listener: socket.socket, application: Callable[..., Any]) -> None:
        """Owns `listener` from now on."""
        self.address = listener.getsockname()
        self._listener = listener
        self._application = application
        self._loop = asyncio.new_event_loop()
        self._end = self._loop.create_future()
        self._open: Dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._thread = threading.Thread(target=self._run, name="p3kv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections, and closes the port."""
        self._loop.call_soon_threadsafe(self._end.set_result, None)
        self._thread.join()

    def close_in_child(self) -> None:
        """Closes the port in a forked child, which has no such thread."""
        self._listener.close()

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda _, context: _log.debug("%s", context["message"]))
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accepted, sock=self._listener, limit=_MOST_REQUEST_BYTES, backlog=_BACKLOG
        )
        await self._end
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve_one(reader, writer))
        self._open[task] = None
        task.add_done_callback(lambda done: self._open.pop(done, None))
        if len(self._open) > _MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._answer(reader, writer), _DEADLINE_S)
        except _BROKEN as error:
            _log.debug("no answer to a request for metrics: %r", error)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = io.BytesIO(await reader.readuntil(b"\r\n\r\n"))
        method, target, _ = request.readline().decode("latin-1").split()
        headers, place = parse_headers(request), urlsplit(target)
        said: List[Tuple[str, List[Tuple[str, str]]]] = []
        parts = self._application(
            {
                "REQUEST_METHOD": method,
                "PATH_INFO": place.path,
                "QUERY_STRING": place.query,
                "HTTP_ACCEPT": headers.get("Accept", ""),
                "HTTP_ACCEPT_ENCODING": headers.get("Accept-Encoding", ""),
            },
            lambda status, fields: said.append((status, fields)),
        )
        body = b"".join(parts)
        status, fields = said[0]
        fields += [("Content-Length", str(len(body))), ("Connection", "close")]
        head = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields)]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        writer.close()
        await writer.wait_closed()
