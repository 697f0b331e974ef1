"""Pictures for `p3kv plan` and `p3kv trace`; the only module of the tools that needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from p3kv.common.tracing import RECEIVE, SEND, SUM, UNKNOWN, UPDATE
from p3kv.common.words import counted
from p3kv.report.verdict import bit_rate
from p3kv.tools.plan import Prediction, Series, Store, stores
from p3kv.tools.timeline import Iteration, Timeline, Traced, passes, percent

_STYLES: Tuple[Dict[str, Any], ...] = (
    {"color": "tab:red", "marker": "s"},
    {"color": "tab:orange", "marker": "^"},
    {"color": "tab:blue", "marker": "o"},
    {"color": "0.8", "linewidth": 6, "zorder": 1},
)
"""By store, in the order of the table."""


def draw_predictions(series: Series, model: str, path: Path) -> None:
    """Writes the picture. Raises OSError, and ValueError for a name whose ending says no format."""
    asked = series.asked
    compared = stores(asked.own)
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    _lines(left, compared, series.curve(), lambda one: one.link_bit_s, lambda one: 1)
    left.axvline(asked.link_bit_s, color="0.85", zorder=0)
    left.set_xticks([one.link_bit_s for one in series.by_bandwidth])
    left.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: bit_rate(rate / 8)))
    left.set_xlabel("bandwidth of each host's link, in each direction")
    left.set_ylabel("samples/s of all hosts")
    left.set_title(counted(asked.hosts, "host"), fontsize=10)

    _lines(
        right, compared, series.by_hosts, lambda one: one.hosts, lambda one: one.hosts,
        markers=True,
    )  # fmt: skip
    at_best = [one for one in series.by_hosts if one.takes_dist_sync_as_balanced]
    if at_best:
        dist_sync, colour = compared[0], _STYLES[0]["color"]
        right.plot(
            [one.hosts for one in at_best],
            [one.samples_s(dist_sync) / one.hosts for one in at_best],
            linestyle="", marker="s", markerfacecolor="white", color=colour,
            label="dist_sync if it were balanced", zorder=4,
        )  # fmt: skip
    right.axvline(asked.hosts, color="0.85", zorder=0)
    right.set_xticks([one.hosts for one in series.by_hosts])
    right.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
    right.set_xlabel("hosts")
    right.set_ylabel("samples/s of each host")
    right.set_title(bit_rate(asked.link_bit_s / 8), fontsize=10)

    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"{model}, {series.batch_size} samples in {series.workload.compute_s:.3g} s on each host "
        "(simulated; processors cost nothing)",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _lines(
    axes: Axes,
    compared: Sequence[Store],
    shown: List[Prediction],
    where: Callable[[Prediction], float],
    divisor: Callable[[Prediction], int],
    markers: bool = False,
) -> None:
    """A line for each store, `where` across, and samples a second by `divisor` upwards."""
    axes.set_xscale("log", base=2)
    at = [where(one) for one in shown]
    for store, style in zip(compared, _STYLES):
        drawn = style if markers else {**style, "marker": ""}
        axes.plot(
            at, [one.samples_s(store) / divisor(one) for one in shown], label=store.name, **drawn
        )
    computing = [one.computing_samples_s / divisor(one) for one in shown]
    axes.plot(at, computing, color="0.5", linestyle="--", label="never waiting", zorder=1)


_ROWS = {"worker": ("compute", "send", "receive"), "server": ("receive", "sum, update", "send")}
"""From top to bottom."""
_ROW_OF = {SEND: "send", RECEIVE: "receive", SUM: "sum, update", UPDATE: "sum, update"}
_COLOURS = colormaps["plasma"]
_NO_PRIORITY = "0.75"
_ROW_INCHES = 0.34
_LEAST_PART = 1 / 1500
"""Part of the width: shorter bars would not be seen."""


class _Bar(NamedTuple):
    """Something in a lane of a row, in nanoseconds, with a key or UNKNOWN."""

    row: str
    lane: int
    start_ns: int
    end_ns: int
    key_id: int


def draw_iteration(
    timeline: Timeline, shown: Iteration, of_all: Sequence[Iteration], path: Path
) -> None:
    """Draws all processes during the iteration `shown`; `of_all` are the workers' own iterations
    of that step, whose numbers are written beside them. Raises OSError."""
    places = _urgency(timeline, shown.step)
    heights = [len(_ROWS[one.role]) for one in timeline.processes]
    height = 1.6 + _ROW_INCHES * sum(heights) + 0.25 * len(heights)
    # matplotlib takes "none", but its types do not know that.
    figure = Figure(figsize=(13, height), layout="none")  # type: ignore[arg-type]
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    numbers = {one.worker: _numbers(one) for one in of_all}
    for axis, one in zip(axes, timeline.processes):
        _draw_process(axis, one, shown, places)
        axis.set_title(f"{one.process.name} ({one.process.host})", loc="left", fontsize=9, pad=3)
        if one.role == "worker" and one.rank in numbers:
            axis.set_title(numbers[one.rank], loc="right", fontsize=8, pad=3)
    axes[-1].set_xlim(0, shown.seconds * 1e3)
    axes[-1].set_xlabel(
        f"ms since worker {shown.worker} began the backward pass of step {shown.step}"
    )
    figure.suptitle("An iteration: backward pass, transfers, next forward pass", fontsize=11)
    figure.subplots_adjust(
        left=0.08, right=0.9, hspace=0.55,
        bottom=0.55 / figure.get_figheight(), top=1 - 0.6 / figure.get_figheight(),
    )  # fmt: skip
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), _COLOURS), cax=figure.add_axes((0.92, 0.3, 0.012, 0.4))
    )
    bar.set_ticks([0, 1], labels=["first layer\n(most urgent)", "last layer"], fontsize=8)
    bar.ax.invert_yaxis()
    figure.savefig(path, dpi=130)


def _urgency(timeline: Timeline, step: int) -> Dict[int, float]:
    """By key, its place in the order of a step's priorities: 0 is the most urgent, 1 the least."""
    priority = {
        span.key_id: span.priority
        for one in timeline.of_role("worker")
        for span in one.spans
        if span.kind == SEND and span.step == step
    }
    order = sorted(priority, key=lambda key_id: -priority[key_id])
    return {key_id: place / max(1, len(order) - 1) for place, key_id in enumerate(order)}


def _bars(one: Traced) -> List[_Bar]:
    bars = []
    if one.role == "worker":
        bars = [_Bar("compute", 0, c.start_ns, c.end_ns, c.key_id) for c in passes(one)]
    for span in one.spans:
        row = _ROW_OF.get(span.kind)
        if row is not None:
            lane = span.peer if span.kind in (SEND, RECEIVE) else 0
            bars.append(_Bar(row, lane, span.start_ns, span.end_ns, span.key_id))
    return bars


def _draw_process(axis: Any, one: Traced, shown: Iteration, places: Dict[int, float]) -> None:
    rows = _ROWS[one.role]
    begin_ns, width_ns = shown.start_ns, shown.end_ns - shown.start_ns
    lanes: Dict[str, Dict[int, List[_Bar]]] = {row: defaultdict(list) for row in rows}
    for bar in _bars(one):
        if bar.end_ns > begin_ns and bar.start_ns < shown.end_ns:
            lanes[bar.row][bar.lane].append(bar)
    for number, row in enumerate(rows):
        height = 0.84 / max(1, len(lanes[row]))
        for place, (_, bars) in enumerate(sorted(lanes[row].items())):
            begins = [max(bar.start_ns, begin_ns) for bar in bars]
            lengths = [
                max(min(bar.end_ns, shown.end_ns) - begin, int(width_ns * _LEAST_PART))
                for bar, begin in zip(bars, begins)
            ]
            axis.broken_barh(
                [
                    ((begin - begin_ns) / 1e6, length / 1e6)
                    for begin, length in zip(begins, lengths)
                ],
                (number - 0.42 + place * height, height),
                facecolors=[_colour(places.get(bar.key_id)) for bar in bars],
                linewidth=0,
            )
            _name_forward(axis, number, bars, begin_ns, width_ns)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _name_forward(axis: Any, number: int, bars: List[_Bar], begin_ns: int, width_ns: int) -> None:
    """Writes into the bar of a forward pass what it is: it has no key, and so no colour."""
    for bar in bars:
        length_ns = min(bar.end_ns, begin_ns + width_ns) - max(bar.start_ns, begin_ns)
        if bar.key_id == UNKNOWN and length_ns > 0.06 * width_ns:
            middle_ms = (max(bar.start_ns, begin_ns) - begin_ns + length_ns / 2) / 1e6
            axis.text(middle_ms, number, "forward", ha="center", va="center", fontsize=8)


def _colour(place: Optional[float]) -> Any:
    return _NO_PRIORITY if place is None else _COLOURS(place)


def _numbers(iteration: Iteration) -> str:
    return (
        f"{iteration.seconds * 1e3:.1f} ms, overlap {percent(iteration.overlap)}, compute idle "
        f"{percent(iteration.compute_idle)}, link idle {percent(iteration.link_idle)}"
    )
