"""What trainings end with, by the bytes that their workers have sent."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.drawing import output
from experiments.drawing.curves import Spread
from experiments.training.encodings import LOCAL
from experiments.training.tasks import TASKS


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each task and rule: loss and accuracy at the end over the seeds, and bytes by those
    of exact gradients in all steps."""
    rows = []
    for task in TASKS:
        for rule in LOCAL:
            of = [run for run in runs if (run["task"], run["rule"]) == (task, rule)]
            if of:
                ends = [run["validated"][-1] for run in of]
                rows.append(
                    {
                        "task": task,
                        "rule": rule,
                        "seeds": len(of),
                        **{
                            name: Spread.of([end[name] for end in ends])._asdict()
                            for name in ("loss", "accuracy")
                        },
                        "sent_share": Spread.of([run["sent_share"] for run in of]).median,
                    }
                )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = ["Loss and accuracy at the end, median (least to greatest), and bytes sent"]
    for row in table:
        loss, right = row["loss"], row["accuracy"]
        lines.append(
            f"{row['task']:7} {LOCAL[row['rule']].title:18} loss {loss['median']:.4f} "
            f"({loss['low']:.4f} to {loss['high']:.4f}), accuracy {right['median']:.4f} "
            f"({right['low']:.4f} to {right['high']:.4f}), bytes {row['sent_share']:.4f}, "
            f"{row['seeds']} seeds"
        )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each task: loss against bytes, from the fewest to all."""
    output.style()
    tasks = list(dict.fromkeys(row["task"] for row in table))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.0 * len(tasks), 3.6), squeeze=False)
    for axis, task in zip(axes.flat, tasks):
        for row in (row for row in table if row["task"] == task):
            loss, exact = row["loss"], row["rule"] == "exact"
            streams = row["rule"].startswith("streaming")
            axis.errorbar(
                row["sent_share"], loss["median"],
                yerr=[[loss["median"] - loss["low"]], [loss["high"] - loss["median"]]],
                marker="D" if exact else "^" if streams else "o", capsize=2.5, markersize=5,
                color=output.COLOURS["p3" if exact else "slicing"],
            )  # fmt: skip
            above = streams or row["rule"] == "local_200"
            axis.annotate(
                f"{LOCAL[row['rule']].title}: {loss['median']:.3g}",
                (row["sent_share"], loss["median"]), fontsize=7, textcoords="offset points",
                xytext=(4, 8 if above else -12),
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.margins(x=0.2, y=0.1)
        axis.set_xlabel("bytes sent, by those of a gradient in each step")
        axis.set_ylabel("loss of samples that nobody trains with, in nats")
        axis.set_title(TASKS[task].title, fontsize=9)
    return figure
