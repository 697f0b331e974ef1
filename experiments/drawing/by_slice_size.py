"""Throughput by the size of slices: measured, and what the simulator expects.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence

from tqdm import tqdm

from experiments.campaign.records import Records
from experiments.campaign.simulated import Simulated
from experiments.drawing import curves
from experiments.models import load
from p3kv.report.forecast import bound
from p3kv.report.forecast.simulator import P3KV

SETTING = "P3KV_SLICE_SIZE"


class Setup(NamedTuple):
    """What one panel of a figure is of."""

    model: str
    hosts: int
    dilation: float
    congestion_control: str
    rate_mbit_s: float


def setups(runs: Iterable[Mapping[str, Any]]) -> List[Setup]:
    """Returns the panels that there are runs for."""
    found = {
        Setup(*(run[field] for field in Setup._fields))
        for run in runs
        if run["rate_mbit_s"] is not None
    }
    return sorted(found)


def summarize(records: Records) -> List[Dict[str, Any]]:
    """Returns for each setup, by size of slices, throughput and what the simulator expects."""
    simulated = Simulated(records)
    table = []
    for setup in setups(records.runs):
        model = load(setup.model)
        samples = curves.samples(setup.model, setup.hosts)
        undilated_bit_s = setup.rate_mbit_s * 1e6 * setup.dilation
        bound_s = setup.dilation * bound.lower_bound_s(
            model.layer_bytes, model.forward_s, model.backward_s, setup.hosts, undilated_bit_s
        )
        free = {**setup._asdict(), "rate_mbit_s": None}
        found = curves.select(records.runs, **setup._asdict())
        sizes = []
        elems_found = sorted({_elems(run) for run in found})
        for elems in tqdm(elems_found, desc=f"simulating {setup.model}", leave=False):
            seconds = curves.iteration_s([run for run in found if _elems(run) == elems])
            unlimited = [run for run in curves.select(records.runs, **free) if _elems(run) == elems]
            simulated_s = setup.dilation * simulated.iteration_s(
                setup.model, P3KV._replace(slice_elems=elems), setup.hosts, undilated_bit_s
            )
            sizes.append(
                {
                    "slice_elems": elems,
                    "measured": curves.throughput(seconds, samples)._asdict(),
                    "simulated": samples / simulated_s,
                    "unlimited_efficiency": curves.unlimited(unlimited).get("p3kv"),
                }
            )
        wire_s = bound.wire_time_s(model.size_bytes, setup.hosts, setup.rate_mbit_s * 1e6)
        table.append(
            {
                **setup._asdict(),
                "ratio": round(wire_s / (model.compute_s * setup.dilation), 3),
                "bound": samples / bound_s,
                "sizes": sizes,
            }
        )
    return table


def _elems(run: Mapping[str, Any]) -> int:
    return int(run["settings"][SETTING])


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns `summarize`'s table, to be read."""
    lines = []
    for row in table:
        lines.append(f"\n{row['model']}, M/C = {row['ratio']:g}: part of the bound's throughput")
        lines.append(
            f"{'elements':>10}{'measured':>10}{'simulated':>11}{'efficiency, no limit':>22}"
        )
        for size in row["sizes"]:
            free = size["unlimited_efficiency"]
            lines.append(
                f"{size['slice_elems']:>10}{size['measured']['median'] / row['bound']:>10.3f}"
                f"{size['simulated'] / row['bound']:>11.3f}"
                + ("" if free is None else f"{free:>22.3f}")
                + ("  limited by this machine" if limited(size) else "")
            )
    return "\n".join(lines)


def limited(size: Mapping[str, Any]) -> bool:
    free = size["unlimited_efficiency"]
    return free is not None and free < curves.CARRIED
