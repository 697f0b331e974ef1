"""A server in which a fault of p3kv's own shows as soon as workers come."""

import os

role = os.environ.pop("DMLC_ROLE")
import p3kv  # noqa: E402, F401
from p3kv.processes import roles  # noqa: E402
from p3kv.server.engine import Engine  # noqa: E402


def fail(*_: object) -> bool:
    raise LookupError("there is no such thing")


Engine.set_slice_sizes = fail  # type: ignore[method-assign]
os.environ["DMLC_ROLE"] = role
roles.take_over()
