"""What p3kv tune has found, as people read it."""

from __future__ import annotations

from typing import List, Sequence

from p3kv.report.verdict import seconds
from p3kv.tools.tune.search import ALIKE, PARTS, Tuning, in_words

_SURE = 0.9


def table(found: Tuning) -> List[str]:
    """The lines of the table: each number of servers, and what the equation says of it."""
    fits = len(found.by_servers) >= PARTS
    rows = [("servers on each host", "in all", "step", "spread", "by the equation" if fits else "")]
    for count, measured in sorted(found.by_servers.items()):
        rows.append((
            str(count),
            str(count * found.hosts),
            seconds(measured.step_s),
            f"{measured.spread:.0%}" if len(measured.steps_s) > 1 else "",
            seconds(found.equation.step_s(count)) if fits else "",
        ))  # fmt: skip
    return _aligned(rows)


def equation(found: Tuning) -> str:
    """The equation with its numbers, and how far it is off."""
    if len(found.by_servers) < PARTS:
        return (
            f"No equation: it has {PARTS} parts, and needs as many numbers of servers. Give a "
            "larger --max-servers."
        )
    fitted = found.equation
    off = max(abs(fitted.step_s(count) / one.step_s - 1) for count, one in found.by_servers.items())
    return (
        f"Equation: a step takes {_short(fitted.fixed_s)} + {_short(fitted.shared_s)} / P + "
        f"{_short(fitted.each_s)} x P with P servers on each host. It is {off:.0%} off at most, "
        f"and shortest with {fitted.best(max(found.by_servers))}."
    )


def choice(found: Tuning) -> str:
    """How many servers, what they gain, and how sure that is."""
    chosen = found.by_servers[found.servers]
    gain = found.by_servers[1].step_s / chosen.step_s
    text = f"Choice: {in_words(found.servers)}"
    if found.servers > 1:
        text += f", with which a step is {gain:.2f} times as fast as with 1"
    elif len(found.by_servers) > 1:
        text += ", because more make no step faster"
    text += (
        f". It is within {ALIKE:.0%} of the best in {found.confidence:.0%} of draws from the "
        "measured rounds and steps"
    )
    if found.confidence < _SURE:
        text += ": this is not sure. Take more --rounds or --steps, and hosts that are free"
    return f"{text}."


def sizes(found: Tuning) -> List[str]:
    """The lines of the table of slice sizes."""
    rows = [("elements in a slice", "step", "spread")]
    for size, measured in found.by_size.items():
        rows.append((
            "as p3kv chooses" if size is None else str(size),
            seconds(measured.step_s),
            f"{measured.spread:.0%}" if len(measured.steps_s) > 1 else "",
        ))  # fmt: skip
    return _aligned(rows)


def size_choice(found: Tuning) -> str:
    """Which size, and what it gains."""
    if found.slice_size is None:
        return "Slices: as p3kv chooses; no other size makes a step faster."
    gain = found.by_size[None].step_s / found.by_size[found.slice_size].step_s
    return f"Slices: {found.slice_size} elements, with which a step is {gain:.2f} times as fast."


def _short(value_s: float) -> str:
    return seconds(value_s) if value_s else "0"


def _aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
