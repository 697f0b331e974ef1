"""The course of a measured figure: measured, worked out, told and drawn."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Mapping

from matplotlib.figure import Figure

from experiments.campaign import options
from experiments.campaign.campaign import Campaign
from experiments.campaign.records import Records
from experiments.drawing import curves


def make(
    name: str,
    about: Mapping[str, str],
    chosen: argparse.Namespace,
    measure: Callable[[Records, Campaign, argparse.Namespace], None],
    summarize: Callable[[Records], Any],
    table_text: Callable[[Any], str],
    draw: Callable[[Records], Figure],
    traffic: bool = False,
) -> None:
    """Measures what `chosen` asks for, if anything, and leaves `name`.json and `name`.png.

    `about` says in words what is measured. `summarize` works the numbers out that `table_text`
    words; the records keep them for `draw`, too. `traffic` is the campaign's.
    """
    records = Records(options.numbers_path(chosen, name), about)
    if not chosen.draw:
        with options.measuring(records, chosen, traffic) as campaign:
            measure(records, campaign, chosen)
    if not curves.select(records.runs):
        raise SystemExit(f"there is nothing to draw in {records.path}")
    records.summary = summarize(records)
    print(table_text(records.summary))
    curves.finish(records, draw(records))
