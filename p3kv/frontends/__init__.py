"""The frameworks that p3kv serves, each attached when the user's script imports it."""

from p3kv.frontends.attach import attach
from p3kv.frontends.table import FRONT_ENDS, register

__all__ = ["FRONT_ENDS", "attach", "register"]
