"""Scripts for DistributedDataParallel as they are: how long a step takes with it and with p3kv.ddp.

Each script of `experiments.as_it_is` trains in its large size on two hosts: on links without a
limit, and on links that take as long for DDP's bytes as its step takes without one (M/C = 1). There
a step has a least time, whatever the store (`as_it_is/bound.py`).

python -m experiments.as_it_is_times
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import textwrap
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.as_it_is import __main__ as scripts
from experiments.as_it_is import bound
from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.drawing import curves, output

_MODULES = {"ddp": (), "p3kv": ("-m", "p3kv.ddp")}
_LINKS = {"no limit": "without_limit", "M/C = 1": "balanced"}
_ABOUT = {
    "figure": f"how long a step of each script takes with DDP and with p3kv.ddp, {scripts.RANKS} "
    "hosts with a rank and a server each; DDP has gloo and the buckets that scripts give it",
    "computation": "beside the small real one, emulated by timed waits of each layer in both "
    "passes, the same with both, so that this machine's cores serve the network",
    "units": "step_s, sent_bytes: means of rank 0's steps and of what its host sends in them, "
    "without the first ten; quartiles_s: of its steps; rate_mbit_s: each link, each direction, "
    "where M/C = 1; bound_s: no order of sending is faster there; differs: losses, of their size",
}


class Case(NamedTuple):
    """A script, measured once with both on both kinds of links."""

    script: str


def run(case: Case) -> Dict[str, Any]:
    """Trains four times, each on hosts of its own. Raises RuntimeError where a script fails."""
    path, found = scripts.HERE / f"{case.script}.py", {}
    rate_mbit_s = None
    for links in _LINKS.values():
        done = {
            name: scripts.run_on_hosts(path, modules, rate_mbit_s)
            for name, modules in _MODULES.items()
        }
        for name, one in done.items():
            if one.code:
                raise RuntimeError(f"{case.script} fails with {name}: {one.error}")
        found[links] = {
            "step_s": {name: round(one.step[0], 4) for name, one in done.items()},
            "quartiles_s": {name: _quartiles(one) for name, one in done.items()},
            "sent_bytes": {name: round(one.step[1]) for name, one in done.items()},
            "differs": scripts.difference(done["ddp"].losses, done["p3kv"].losses),
        }
        if rate_mbit_s is None:
            rate_mbit_s = round(done["ddp"].balanced_mbit_s, 1)
    assert rate_mbit_s is not None
    ways, compute_s = done["p3kv"].ways, min(found["without_limit"]["step_s"].values())
    found["bound_s"] = round(
        bound.bound_s(
            bound.events_of(case.script), compute_s, scripts.RANKS, rate_mbit_s * 1e6,
            by_servers="workers" not in ways,
        ), 4
    )  # fmt: skip
    return {**found, "ways": ways, "rate_mbit_s": rate_mbit_s}


def _quartiles(one: scripts.Run) -> List[float]:
    seconds = [step_s for step_s, _ in one.steps]
    return [round(part, 4) for part in statistics.quantiles(seconds, n=4)]


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each script: how many times as fast a step is with p3kv, over the repetitions."""
    rows = []
    for script in dict.fromkeys(run["script"] for run in runs):
        of = [run for run in runs if run["script"] == script]
        row = {"script": script, "ways": of[-1]["ways"], "repetitions": len(of)}
        for links in _LINKS.values():
            steps = [run[links]["step_s"] for run in of]
            speed_ups = [step["ddp"] / step["p3kv"] for step in steps]
            row[links] = curves.Spread.of(speed_ups).rounded(3)
        most = [run["balanced"]["step_s"]["ddp"] / run["bound_s"] for run in of]
        row["most"] = round(statistics.median(most), 3)
        row["differs"] = max(run[links]["differs"] for run in of for links in _LINKS.values())
        rows.append(row)
    return sorted(rows, key=lambda row: ("workers" in row["ways"], row["script"]))


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    return "\n".join(
        f"{row['script']:12} {row['ways']:30} "
        + ", ".join(
            f"{name}: {row[links]['median']:.2f} x ({row[links]['low']:.2f} to "
            f"{row[links]['high']:.2f})"
            for name, links in _LINKS.items()
        )
        + f" of at most {row['most']:.2f}, losses differ by {row['differs']:.0e}, "
        f"{row['repetitions']} times"
        for row in table
    )


def draw(table: Sequence[Mapping[str, Any]]) -> Figure:
    """A bar for each script and kind of links; a line where no store can be faster."""
    output.style()
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True)
    colours = {"servers": output.COLOURS["p3"], "workers": output.COLOURS["baseline"]}
    for axis, (name, links) in zip(axes, _LINKS.items()):
        for at, row in enumerate(table):
            spread, way = row[links], "workers" if "workers" in row["ways"] else "servers"
            ends = [[spread["median"] - spread["low"]], [spread["high"] - spread["median"]]]
            bar = axis.bar(at, spread["median"], color=colours[way], yerr=ends)
            axis.bar_label(bar, [f"{spread['median']:.2f}"], fontsize=7, label_type="center")
            if links == "balanced":
                axis.hlines(row["most"], at - 0.45, at + 0.45, color="black")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel("times as fast as DDP")
        axis.set_title(f"links: {name}", fontsize=9)
        axis.margins(y=0.15)
    axes[-1].set_xticks(range(len(table)), [row["script"] for row in table], rotation=60)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes[1].legend(handles, [f"{way} update" for way in colours], fontsize=8)
    said = (
        f"Computation is {_ABOUT['computation']}. Lines at the bars: all repetitions. Black: no "
        "order of sending is faster."
    )
    figure.supxlabel("\n".join(textwrap.wrap(said, 130)), fontsize=7, color="#555555")
    return figure


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1, metavar="N")
    names = [
        name
        for name in scripts.script_names()
        if name not in scripts.STARTS_ITSELF
        and all(map(importlib.util.find_spec, scripts.NEEDS.get(name, ())))
    ]
    parser.add_argument("--scripts", nargs="+", choices=names, default=names)
    chosen = parser.parse_args(argv)
    options.check_torch(chosen)
    os.environ["SIZE"] = "large"
    cases = [Case(name) for name in (chosen.scripts[:1] if chosen.quick else chosen.scripts)]
    records = Records(options.numbers_path(chosen, "as_it_is"), _ABOUT)
    turns.measure_each(records, chosen, cases * (1 if chosen.quick else chosen.repetitions), run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
