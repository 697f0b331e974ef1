"""Decisions of a server, without sockets, queues and threads."""

from p3kv.server.engine.engine import Engine, Key
from p3kv.server.engine.keys import ServerKey
from p3kv.server.engine.ledger import OwnRounds
from p3kv.server.engine.rows import RowsKey
from p3kv.server.engine.slices import BucketSlice, ServerSlice
from p3kv.server.engine.unit import Ended, Unit

__all__ = [
    "BucketSlice",
    "Ended",
    "Engine",
    "Key",
    "OwnRounds",
    "RowsKey",
    "ServerKey",
    "ServerSlice",
    "Unit",
]
