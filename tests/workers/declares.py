"""Joins a job without MXNet, and declares a key whose gradients travel in two bits."""

import p3kv  # noqa: F401, I001

from p3kv import config
from p3kv.common.registry import Choice
from p3kv.worker import this_process

worker = this_process.worker()
worker.start(config.freeze())
store = worker.new_store()
store.choose_gradient_codec(Choice("2bit"))
store.declare("w", (3,), "float32")
worker.barrier()
print(f"worker {worker.rank} has declared its key")
