"""A model as the network sees it: its layers, their parameters, and how long they compute."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Tuple

from p3kv.report.forecast.simulator import FLOAT32_BYTES, Workload

# A backward pass computes two products, for the input and for the weight, where the forward
# pass computes one.
_FORWARD_SHARE = 1 / 3


class Parameter(NamedTuple):
    """One array of a model, trained or not."""

    name: str
    shape: Tuple[int, ...]

    @property
    def elems(self) -> int:
        return math.prod(self.shape)


class Layer(NamedTuple):
    """Computation of a forward pass between two reads of parameters.

    `parameters` are the trained ones, in the order in which the forward pass reads them; `flops` is
    the layer's forward work for one batch, a multiplication and an addition counted as two.
    `crossing_elems`: what later layers read of all that has been computed up to this one, for one
    batch. It crosses a cut of the model behind this layer.
    """

    name: str
    parameters: Tuple[Parameter, ...]
    flops: float
    crossing_elems: int = 0

    @property
    def elems(self) -> int:
        return sum(parameter.elems for parameter in self.parameters)

    @property
    def size_bytes(self) -> int:
        return self.elems * FLOAT32_BYTES


class Model(NamedTuple):
    """A model as the network sees it.

    `layers` are in forward order. `parameters` are all arrays, trained or not, in the order of
    their keys: the position is the key. `compute_s` is C, the time of one iteration's forward and
    backward pass, in seconds, of which `forward_share` is the forward pass.
    """

    name: str
    batch_size: int
    compute_s: float
    layers: Tuple[Layer, ...]
    parameters: Tuple[Parameter, ...]
    forward_share: float = _FORWARD_SHARE

    @property
    def keys(self) -> Dict[str, int]:
        """The key of every parameter by name."""
        return {parameter.name: key for key, parameter in enumerate(self.parameters)}

    @property
    def elems(self) -> int:
        """Trained elements."""
        return sum(layer.elems for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        """S: what a worker pushes in one iteration, in bytes of float32."""
        return self.elems * FLOAT32_BYTES

    @property
    def layer_bytes(self) -> List[int]:
        return [layer.size_bytes for layer in self.layers]

    @property
    def forward_s(self) -> List[float]:
        """f_i: C's forward part, shared out by the layers' work, in seconds."""
        total = sum(layer.flops for layer in self.layers)
        return [self.compute_s * self.forward_share * layer.flops / total for layer in self.layers]

    @property
    def backward_s(self) -> List[float]:
        """b_i: C's backward part, in seconds, by layer in forward order."""
        return [seconds * (1 / self.forward_share - 1) for seconds in self.forward_s]

    @property
    def workload(self) -> Workload:
        """The model as forecasts and simulations take it."""
        keys = self.keys
        arrays = [
            [(keys[parameter.name], parameter.elems) for parameter in layer.parameters]
            for layer in self.layers
        ]
        return Workload(arrays, self.forward_s, self.backward_s)
