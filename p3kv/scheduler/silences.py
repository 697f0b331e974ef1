"""When each node was last heard of, and what the others are told of those that are silent."""

from __future__ import annotations

from typing import Dict, Iterator, Optional, Tuple

from p3kv.config import Settings
from p3kv.scheduler.membership import Node
from p3kv.wire.messages import PeerSilent
from p3kv.wire.silence import OwnPauses, Silence

LOOK_EVERY_S = 1.0
"""How often `Silences.look` is to be called."""


class Silences:
    """Silent nodes, by their connections. Times are of the monotonic clock."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.silence_timeout_s
        self._warn_after_s = settings.warn_after_s
        self._nodes: Dict[bytes, Tuple[Node, Silence]] = {}
        self._own_pauses = OwnPauses(LOOK_EVERY_S)

    def heard(self, node: Node, now: float) -> Optional[PeerSilent]:
        """Takes note of a message of a node; returns what to tell if the node was said to be
        silent."""
        _, silence = self._nodes.setdefault(node.identity, (node, Silence(now, self._warn_after_s)))
        silent_s = silence.heard(now)
        return None if silent_s is None else self._words(node, silent_s, answers=True)

    def look(self, now: float) -> Iterator[Tuple[Node, PeerSilent]]:
        """The nodes of whom the others are to be told now."""
        pause_s = self._own_pauses.look(now)
        for node, silence in self._nodes.values():
            silence.leave_out(pause_s, now)
            silent_s = silence.due_s(now)
            if silent_s is not None and not node.gone:
                yield node, self._words(node, silent_s)

    def waits_s(self, identity: bytes, now: float) -> float:
        """How long to wait for a node whose connection has ended now."""
        _, silence = self._nodes.get(identity, (None, Silence(now, self._warn_after_s)))
        return silence.waits_s(now, self._timeout_s)

    def end(self, node: Node, now: float) -> Optional[float]:
        """How long a node was silent when its connection ended; None if it had ended before."""
        _, silence = self._nodes.pop(node.identity, (node, None))
        return None if silence is None else silence.lasts_s(now)

    def _words(self, node: Node, silent_s: float, answers: bool = False) -> PeerSilent:
        return PeerSilent(node.name(), silent_s, self._timeout_s, answers)
