"""Joins a job, meets the others, and ends with the exit code that the test asks for.

Arguments: the code; and how: `exit` (by `sys.exit`), `raise` (by SystemExit itself), or `caught`
(by `sys.exit`, which the script catches).
"""

import p3kv  # noqa: F401, I001
import sys

from p3kv import config
from p3kv.worker import this_process

worker = this_process.worker()
worker.start(config.freeze())
worker.barrier()
code, how = int(sys.argv[1]), sys.argv[2]
if how == "raise":
    raise SystemExit(code)
try:
    sys.exit(code)
except SystemExit as end:
    assert end.code == code
    if how != "caught":
        raise
