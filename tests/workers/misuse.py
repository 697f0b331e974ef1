"""Joins a job and asks for a key that nobody has declared."""

import p3kv  # noqa: F401
from p3kv import config
from p3kv.worker import this_process

worker = this_process.worker()
worker.start(config.freeze())
worker.new_store().key("nobody")  # line 9
