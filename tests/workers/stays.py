"""Joins a job, says when the job has failed, and stays until it is ended."""

import p3kv  # noqa: F401, I001
import time

from p3kv import config
from p3kv.errors import P3Error
from p3kv.worker import this_process

worker = this_process.worker()
worker.start(config.freeze())
try:
    while True:
        worker.check()
        time.sleep(0.02)
except P3Error as error:
    print(error, flush=True)
while True:
    time.sleep(1.0)
