"""Tensors cut into slices, and the slices' place on the servers."""

from p3kv.slicing.placement import PLACEMENTS, Placement, Topology, checked, link_rates
from p3kv.slicing.size import (
    CREDIT_BYTES,
    LEAST_CREDIT_BYTES,
    gradient_credit_bytes,
    patient_sizes,
    slice_size_for,
    value_credit_bytes,
)
from p3kv.slicing.slices import (
    BUCKET,
    LAYOUTS,
    Layout,
    Run,
    Slice,
    balanced_runs,
    cut,
    loads_with,
    make_layout,
)

__all__ = [
    "BUCKET", "CREDIT_BYTES", "LAYOUTS", "LEAST_CREDIT_BYTES", "PLACEMENTS", "Layout",
    "Placement", "Run", "Slice", "Topology", "balanced_runs", "checked", "cut",
    "gradient_credit_bytes", "link_rates", "loads_with", "make_layout", "patient_sizes",
    "slice_size_for",
    "value_credit_bytes",
]  # fmt: skip
