"""Decisions of a server, without sockets, queues and threads."""

from p3kv.server.engine.engine import Answer, Blame, Command, Engine, Pull, SendSquares, SendVotes
from p3kv.server.engine.keys import ServerKey
from p3kv.server.engine.rounds import OwnRounds, Record, Round, Wait
from p3kv.server.engine.rows import RowsFrame, RowsSnapshot, SentRows, ServerRows
from p3kv.server.engine.slices import BucketSlice, LateBytes, Payload, ServerSlice
from p3kv.server.engine.state import Buffer, ServerState
