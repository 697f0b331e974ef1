"""Tensors cut into slices, and the slices' place on the servers."""

from p3kv.slicing.layout import LAYOUTS, Layout, make_layout
from p3kv.slicing.placement import PLACEMENTS, Placement, checked
from p3kv.slicing.size import (
    CREDIT_BYTES,
    LEAST_CREDIT_BYTES,
    gradient_credit_bytes,
    patient_sizes,
    slice_size_for,
    value_credit_bytes,
)
from p3kv.slicing.slices import Run, Slice, balanced_runs, cut, loads_with
from p3kv.slicing.topology import Topology, link_rates

__all__ = [
    "CREDIT_BYTES",
    "LAYOUTS",
    "LEAST_CREDIT_BYTES",
    "PLACEMENTS",
    "Layout",
    "Placement",
    "Run",
    "Slice",
    "Topology",
    "balanced_runs",
    "checked",
    "cut",
    "gradient_credit_bytes",
    "link_rates",
    "loads_with",
    "make_layout",
    "patient_sizes",
    "slice_size_for",
    "value_credit_bytes",
]
