"""A model's layers as text, for workers that can't make the model: they have no MXNet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, List, NamedTuple, Sequence

if TYPE_CHECKING:  # whoever imports p3kv in a worker joins a job
    from p3kv.report.forecast import Model


class PlainLayer(NamedTuple):
    """A layer of `p3kv.report.forecast.Model`; times are in seconds."""

    shapes: Sequence[Sequence[int]]
    forward_s: float
    backward_s: float


def layers_as_text(model: Model) -> str:
    """Returns the layers as `layers_from_text` reads them."""
    return json.dumps(
        [
            PlainLayer([parameter.shape for parameter in layer.parameters], forward_s, backward_s)
            for layer, forward_s, backward_s in zip(model.layers, model.forward_s, model.backward_s)
        ]
    )


def layers_from_text(text: str, dilation: float) -> List[PlainLayer]:
    """Returns the layers, in forward order; `dilation` multiplies their times."""
    return [
        PlainLayer(shapes, forward_s * dilation, backward_s * dilation)
        for shapes, forward_s, backward_s in json.loads(text)
    ]
