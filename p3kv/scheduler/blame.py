"""Finds the process whose end makes the job fail, from what several witnesses have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from p3kv.common import words
from p3kv.wire.launcher_link import PartEnded
from p3kv.wire.messages import UNKNOWN, Failure
from p3kv.wire.silence import SILENT_HINT, SILENT_S, for_so_long

_OUT_OF_MEMORY = "The kernel's out-of-memory killer does this, too: its log (dmesg) says so."
_ITS_OUTPUT = "See its own output for why."


@dataclass
class _Suspect:
    """Facts known of one process."""

    role: str
    rank: int
    round: int = UNKNOWN
    place: str = ""
    end: Optional[PartEnded] = None
    lacks: str = ""
    """Words for what the process had not done when it ended."""
    silent_s: Optional[float] = None
    """How long the scheduler had not heard from it when their connection ended."""
    report: Optional[Failure] = None

    def failure(self) -> Failure:
        reason, hint = self._reason_and_hint()
        error = "RendezvousError" if self.lacks == NEVER_JOINED else "PeerLostError"
        return Failure(reason, self.role, self.rank, self.round, error, hint)

    def _reason_and_hint(self) -> Tuple[str, str]:
        if self.end is not None:
            killed = self.end.signal == "SIGKILL"
            hint = _OUT_OF_MEMORY if killed else "" if self.end.signal else _ITS_OUTPUT
            if self.lacks == NEVER_JOINED and self.end.code == 0:
                hint = f"Does its script import p3kv, and use {words.current().use_store}?"
            return f"its process {self.end.how}{self.lacks}", hint
        if self.silent_s is not None and self.silent_s >= SILENT_S:
            reason = f"it has not answered for {for_so_long(self.silent_s)} ({self.place})"
            return reason, SILENT_HINT
        if self.silent_s is not None:
            return (
                f"its process ended without a word ({self.place})",
                f"{_ITS_OUTPUT} A signal such as that of the kernel's out-of-memory killer leaves "
                "none.",
            )
        assert self.report is not None
        return self.report.reason, self.report.hint


NEVER_JOINED = " before it joined the job"
WITHOUT_LEAVING = " without leaving the job"
LEFT = ", though it had left the job in order"


class Blame:
    """Collects what witnesses have seen of lost processes, until all have had time to report.

    The launcher knows best how a process ended, and the scheduler how long it was silent and in
    which round; its peers may know a later one.
    """

    def __init__(self) -> None:
        self._suspects: Dict[Tuple[str, int], _Suspect] = {}
        self._rounds: Dict[Tuple[str, int], int] = {}
        """In which round each process was whose data connections have ended."""

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def link_ended(self, failure: Failure) -> None:
        """A node's data connection to the process that `failure` is about has ended. If that
        process turns out to be lost, its round is known."""
        who = failure.role, failure.rank
        self._rounds[who] = max(failure.round, self._rounds.get(who, UNKNOWN))

    def lost(self, failure: Failure, witness: str) -> None:
        """A node, `witness`, has lost its connection to the process that `failure` is about."""
        suspect = self._suspect(failure.role, failure.rank)
        suspect.round = max(suspect.round, failure.round)
        if suspect.report is None:
            reason = f"{failure.reason} (seen by {witness})"
            suspect.report = Failure(reason, failure.role, failure.rank, hint=failure.hint)

    def disconnected(
        self, role: str, rank: int, place: str, silent_s: float, round: int = UNKNOWN
    ) -> None:
        """The scheduler has lost its connection to a process, last heard of `silent_s` ago, in
        `round`."""
        suspect = self._suspect(role, rank)
        suspect.round = max(suspect.round, round)
        suspect.place, suspect.silent_s = place, silent_s

    def ended(self, end: PartEnded, lacks: str) -> None:
        """The launcher has seen a process end that should not have ended so."""
        suspect = self._suspect(end.role, end.rank)
        suspect.end, suspect.lacks = end, lacks

    def verdict(self) -> Failure:
        """Why the job ends. Of several processes, one that has ended counts before one that the
        scheduler can't reach, and that before one to which only a peer has lost its connection."""
        suspects = list(self._suspects.values())
        ended: List[_Suspect] = [one for one in suspects if one.end is not None]
        unreached = [one for one in suspects if one.silent_s is not None]
        guilty = (ended or unreached or suspects)[0]
        guilty.round = max(guilty.round, self._rounds.get((guilty.role, guilty.rank), UNKNOWN))
        return guilty.failure()

    def _suspect(self, role: str, rank: int) -> _Suspect:
        return self._suspects.setdefault((role, rank), _Suspect(role, rank))
