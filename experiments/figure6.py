"""Figure 6 of P3: a heavy middle layer, sent whole and in slices.

Each pass of a layer takes one unit of time; the synchronisation of the middle layer takes six
units of the link and that of the others two. Both columns send first in, first out. A whole layer
is answered when its last byte has come, so its gradient and its parameters never travel at the
same time; slices fill the link in both directions.

Measured, whole layers come later than simulated: a host's worker and server share its link evenly,
so that both of their layers arrive at the end, where the simulator sends one after the other.

python -m experiments.figure6
"""

from __future__ import annotations

from typing import Optional, Sequence

from experiments.drawing import schedule_figure
from experiments.drawing.schedule_figure import Case, Example

_HEAVIEST_ELEMS = 2_250_000
EXAMPLE = Example(
    "heavy_middle",
    ratio=5 / 3,
    cases=(
        Case("(a) whole layers", "slicing", _HEAVIEST_ELEMS),
        Case("(b) slices", "slicing", 12_500),
    ),
)


def main(argv: Optional[Sequence[str]] = None) -> None:
    schedule_figure.main("figure6", EXAMPLE, "A heavy middle layer, whole and in slices", argv)


if __name__ == "__main__":
    main()
