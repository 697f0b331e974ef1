"""The table of front ends. A framework is added by a folder beside this file and a line here."""

from __future__ import annotations

from typing import Tuple

from p3kv import config
from p3kv.common import words
from p3kv.config import forwarding
from p3kv.frontends.front_end import FrontEnd
from p3kv.frontends.mxnet.front_end import MXNet
from p3kv.server.optimizer import OPTIMIZERS

FRONT_ENDS: Tuple[FrontEnd, ...] = (MXNet(),)


def register() -> None:
    """Tells the rest of p3kv what it must know of front ends; before the process takes its role."""
    for front_end in FRONT_ENDS:
        words.add(front_end.words)
        config.add_aliases(front_end.aliases)
        forwarding.add_prefix(front_end.prefix)
        OPTIMIZERS.register(front_end.name, front_end.make_optimizer)
