"""Figure 4 of P3: three equal layers, sent as their gradients come and by priority.

Each pass of a layer takes one unit of time and its synchronisation two units of the link. First
in, first out, the first layer's parameters come last: the accelerator waits four units. With
priorities it waits two, and the rest travels during the forward pass. Measured, it waits a little
longer: for slices that were begun, and for what the kernel had, when the first layer's came.

python -m experiments.figure4
"""

from __future__ import annotations

from typing import Optional, Sequence

from experiments.drawing import schedule_figure
from experiments.drawing.schedule_figure import Case, Example

_SLICE_ELEMS = 12_500
EXAMPLE = Example(
    "equal_layers",
    ratio=1.0,
    cases=(
        Case("(a) first in, first out", "slicing", _SLICE_ELEMS),
        Case("(b) priority", "p3kv", _SLICE_ELEMS),
    ),
)


def main(argv: Optional[Sequence[str]] = None) -> None:
    schedule_figure.main("figure4", EXAMPLE, "Three equal layers, with and without priority", argv)


if __name__ == "__main__":
    main()
