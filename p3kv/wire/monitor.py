"""Events of a ZeroMQ socket's connections."""

from __future__ import annotations

import struct
from typing import Tuple

import zmq

_EVENT = struct.Struct("=Hi")


def receive_event(monitor: zmq.Socket) -> Tuple[int, int]:
    """An event and its value from a socket's monitor; waits for one.

    `zmq.utils.monitor` reads them as well, and imports asyncio, which takes each process of a job
    a tenth of its start.
    """
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value
