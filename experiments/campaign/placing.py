"""Servers' loads by placement, worked out as the scheduler does it."""

from __future__ import annotations

from typing import List

import experiments.emulation.placements
from experiments.models import load
from p3kv.slicing.placement import PLACEMENTS, Topology
from p3kv.slicing.slices import Dense, loads_with

PLUGIN = experiments.emulation.placements.__name__
"""The module that processes import for placements that p3kv does not have."""
_SLICE_ELEMS = 50_000


def loads_elems(placement: str, model: str, hosts: int) -> List[int]:
    """Elements on each server, on hosts that each have a worker and a server."""
    names = tuple(map(str, range(hosts)))
    decide, topology = PLACEMENTS.make(placement), Topology(names, names)
    loads = [0] * hosts
    for parameter in load(model).parameters:
        layout = Dense(parameter.shape)
        loads = loads_with(loads, decide.place(layout, _SLICE_ELEMS, loads, topology))
    return loads
