"""Looks at all hosts of a job over ssh, and at the ways between them."""

from __future__ import annotations

import secrets
import statistics
import time
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar

import msgspec

from p3kv import config
from p3kv.processes.launcher import Agent, Host, address_of_first, agents_on
from p3kv.report.verdict import bit_rate, seconds
from p3kv.tools.doctor import OK, PROBLEM, WARNING, Finding
from p3kv.tools.doctor_agent import Look, Looked, Ping, Question, Send, TellTime, Time, WayMeasured

_MODULE = "p3kv.tools.doctor_agent"
_MUST_AGREE = ("p3kv",)
"""Processes with other versions of these refuse each other; other packages should agree."""
_SLOW = 1 / 2
"""A way that carries less than this part of the median is told of."""
_CLOCK_TRIES = 5
_FAR_APART_S = 1.0

Answer = TypeVar("Answer", bound=msgspec.Struct)
_Way = Tuple[str, str]
"""The names of who sends and who receives."""
Section = Tuple[str, List[Finding]]
"""A title, and what was found."""


class _Reached(NamedTuple):
    """A host that was reached, and what it tells of itself."""

    agent: Agent
    looked: Looked

    @property
    def name(self) -> str:
        return self.agent.host.name


def examine_hosts(hosts: Sequence[Host]) -> Iterator[Section]:
    """Looks at each host, then at what they have in common, then at the ways between them; yields
    each part when it is there. Some seconds, and a third of a second more for each host."""
    root_host = config.root_host() or address_of_first(hosts)
    look = Look(root_host, secrets.token_hex(16))
    with agents_on(hosts, _MODULE) as agents:
        reached: List[_Reached] = []
        for agent, problem in _begun(agents, look):
            title = f"host {agent.host.name}"
            if problem is not None:
                yield title, [_not_reached(problem)]
                continue
            looked = _answer(agent, Looked)
            if isinstance(looked, str):
                yield title, [_helper_ended(looked)]
            else:
                reached.append(_Reached(agent, looked))
                yield title, looked.seen.findings
        if len(reached) > 1:
            yield "all hosts", [_clocks(reached), *_versions(reached)]
            yield "between hosts", list(_ways(reached))


def _begun(agents: Sequence[Agent], look: Look) -> List[Tuple[Agent, Optional[str]]]:
    """Have all helpers look at the same time; with each the reason if ssh did not start it."""
    begun: List[Tuple[Agent, Optional[str]]] = []
    for agent in agents:
        try:
            agent.begin()
            _tell(agent, look)  # one that ends has last words in place of an answer
            begun.append((agent, None))
        except OSError as error:
            begun.append((agent, str(error)))
    return begun


def _not_reached(why: str) -> Finding:
    return Finding(
        PROBLEM,
        f"ssh does not start p3kv there: {why}",
        "ssh must reach the host without a password, and the host must have Python and p3kv at "
        "the same paths as this one",
    )


def _helper_ended(why: str) -> Finding:
    return Finding(
        PROBLEM,
        f"ssh has started Python there, but p3kv's helper ends with: {why}",
        "the host must have p3kv, and what it needs, at the same paths as this one: run 'p3kv "
        "doctor' there",
    )


def _answer(agent: Agent, kind: Type[Answer]) -> Answer | str:
    """The helper's answer, or why there is none."""
    try:
        return msgspec.json.decode(agent.answer(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        return str(error)


def _tell(agent: Agent, question: Question) -> Optional[str]:
    """Asks the helper; returns why that fails, if it does."""
    try:
        agent.ask(msgspec.json.encode(question))
    except OSError as error:
        return str(error)
    return None


def _versions(reached: Sequence[_Reached]) -> Iterator[Finding]:
    """Each package whose versions differ between hosts; one line if none does."""
    found: Dict[str, Dict[str, List[str]]] = {}
    for one in reached:
        for package, version in one.looked.seen.versions.items():
            found.setdefault(package, {}).setdefault(version, []).append(one.name)
    differ = {package: hosts for package, hosts in found.items() if len(hosts) > 1}
    if not differ:
        yield Finding(OK, "Python and all packages have the same versions")
    for package, versions in differ.items():
        text = "; ".join(f"{version} on {', '.join(names)}" for version, names in versions.items())
        yield Finding(
            PROBLEM if package in _MUST_AGREE else WARNING,
            f"{package} has different versions: {text}",
            "install the same on all hosts",
        )


def _clocks(reached: Sequence[_Reached]) -> Finding:
    """How far clocks are apart: p3kv needs no agreement, but people compare lines of logs."""
    offsets_s: Dict[str, float] = {}
    worst_s = 0.0
    for one in reached:
        round_trips = []
        for _ in range(_CLOCK_TRIES):
            begin_s = time.time()
            told = _tell(one.agent, TellTime()) or _answer(one.agent, Time)
            end_s = time.time()
            if isinstance(told, str):
                return Finding(PROBLEM, f"{one.name} does not answer any more: {told}")
            round_trips.append((end_s - begin_s, told.time_s - (begin_s + end_s) / 2))
        took_s, offsets_s[one.name] = min(round_trips)
        worst_s = max(worst_s, took_s / 2)
    first, *_, last = sorted(offsets_s, key=offsets_s.__getitem__)
    apart_s = offsets_s[last] - offsets_s[first]
    text = f"clocks are {seconds(apart_s)} apart at most (known within {seconds(2 * worst_s)})"
    if apart_s < _FAR_APART_S:
        return Finding(OK, text)
    return Finding(
        WARNING,
        f"{text}: {last} is ahead of {first}. Jobs run, but times in logs can't be compared",
        "have NTP set the clocks",
    )


def _ways(reached: Sequence[_Reached]) -> Iterator[Finding]:
    """Each way that there is not, the numbers of all others, and those that are slow."""
    trips_s: Dict[_Way, float] = {}
    for sender, target, told in _measured(reached, Ping):
        if told.problem:
            yield _no_way(sender, target, told.problem)
        else:
            trips_s[sender.name, target.name] = told.number
    rates_bytes_s = {
        (sender.name, target.name): told.number
        for sender, target, told in _measured(reached, Send)
        if not told.problem
    }
    for sender in reached:
        own = [way for way in rates_bytes_s if way[0] == sender.name and way in trips_s]
        words = [
            f"to {way[1]} {bit_rate(rates_bytes_s[way])}, round trip {seconds(trips_s[way])}"
            for way in own
        ]
        if words:
            yield Finding(OK, f"{sender.name} {'; '.join(words)}")
    median = statistics.median(rates_bytes_s.values() or [0.0])
    for (name, target_name), rate in rates_bytes_s.items():
        if rate < _SLOW * median:
            yield Finding(
                WARNING,
                f"{name} sends only {bit_rate(rate)} to {target_name}; the median of all ways is "
                f"{bit_rate(median)}",
                "all workers wait for the slowest: look for traffic of others, a slow port or "
                "cable, or an interface of another network (DMLC_INTERFACE)",
            )


def _measured(
    reached: Sequence[_Reached], kind: Type[Ping] | Type[Send]
) -> Iterator[Tuple[_Reached, _Reached, WayMeasured]]:
    """Measures all ways, in rounds: in each, every host sends to one other, and receives from one
    other, as in training."""
    for distance in range(1, len(reached)):
        asked = []
        for index, sender in enumerate(reached):
            target = reached[(index + distance) % len(reached)]
            address, port = target.looked.seen.address, target.looked.port
            if address is not None and port is not None:
                asked.append((sender, target, _tell(sender.agent, kind(address, port))))
        for sender, target, problem in asked:
            told = problem or _answer(sender.agent, WayMeasured)
            yield sender, target, WayMeasured(problem=told) if isinstance(told, str) else told


def _no_way(sender: _Reached, target: _Reached, why: str) -> Finding:
    return Finding(
        PROBLEM,
        f"{sender.name} does not reach {target.name} at {target.looked.seen.address}, port "
        f"{target.looked.port}: {why}",
        "let firewalls pass all TCP ports from 1024 on between the hosts, or set DMLC_INTERFACE "
        "to the interface of the job's network",
    )
