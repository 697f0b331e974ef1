"""Joins a job and waits for its failure, as a script that trains would meet it.

Arguments: the rank of a worker that breaks the protocol, if one shall.
"""

import p3kv  # noqa: F401, I001
import sys
import time

from p3kv import config
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import URGENT
from p3kv.worker import this_process

_LONGEST_S = 60.0

worker = this_process.worker()
worker.start(config.freeze())
worker.barrier()
if sys.argv[1:] == [str(worker.rank)]:
    nonsense = Header(99, worker.rank)
    for server in worker._joined.servers.values():
        worker.loop.call_soon(server.writer.push, Frame(URGENT, nonsense))
deadline = time.monotonic() + _LONGEST_S
while time.monotonic() < deadline:
    worker.check()
    time.sleep(0.02)
