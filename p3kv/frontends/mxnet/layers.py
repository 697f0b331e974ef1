"""The layers of a gluon network, read off its symbolic graph.

A layer is a node of the graph that reads parameters, together with the nodes without parameters
(activations, pooling, additions) that follow it. Only shapes are inferred: no weight is
allocated, so VGG-19 costs milliseconds and no memory.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import (
    AbstractSet,
    Any,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Sequence,
    Set,
    Tuple,
)

import mxnet as mx
from mxnet.gluon.model_zoo import vision

from p3kv.report.forecast import Layer, Model, Parameter


class _Use(NamedTuple):
    """A node that reads parameters for the first time, and the last node of its layer."""

    node: int
    parameters: List[str]
    end: int


def trace(
    block: mx.gluon.HybridBlock, inputs: Mapping[str, Tuple[int, ...]]
) -> Tuple[List[Layer], List[Parameter]]:
    """Returns the layers in forward order, and all parameters in the order of gluon's Trainer.

    `inputs` are the shapes of the block's arguments by name, in the order of the call. The
    position in the second list is the Trainer's key: it sorts the names of all parameters, so
    the running statistics of batch normalisation take numbers although they are never pushed.
    """
    symbol = block(*[mx.sym.var(name) for name in inputs])
    internals = symbol.get_internals()
    graph = json.loads(internals.tojson())
    _, output_shapes, _ = internals.infer_shape(**inputs)
    shapes = {
        (node, output): shape for (node, output, *_), shape in zip(graph["heads"], output_shapes)
    }
    nodes = graph["nodes"]
    parameters = block.collect_params()
    trained = {name for name in parameters if parameters[name].grad_req != "null"}
    shape_of = {
        node["name"]: shapes[index, 0] for index, node in enumerate(nodes) if node["op"] == "null"
    }

    uses = _merge_recurrent(_first_uses(nodes, set(inputs), trained))
    flops = [0.0] * len(uses)
    layer_of: List[int] = []
    position = 0
    for index, node in enumerate(nodes):
        while position + 1 < len(uses) and uses[position + 1].node <= index:
            position += 1
        layer_of.append(position)
        flops[position] += _node_flops(index, node, shapes)
    crossing = _crossing_elems(nodes, set(inputs), layer_of, shapes)
    layers = [
        Layer(
            _common_name(use.parameters, block.prefix),
            tuple(Parameter(name, shape_of[name]) for name in use.parameters),
            work,
            elems,
        )
        for use, work, elems in zip(uses, flops, crossing)
    ]
    return layers, [Parameter(name, shape_of[name]) for name in sorted(parameters)]


def _first_uses(
    nodes: Sequence[Mapping[str, Any]], inputs: AbstractSet[str], trained: AbstractSet[str]
) -> List[_Use]:
    """The nodes where data meets parameters, in the graph's order.

    A node that depends on parameters alone, such as the concatenation of an LSTM's weights,
    waits for no data: its parameters count where its result is read.
    """
    constant: Dict[int, Tuple[str, ...]] = {}
    reads: Dict[str, List[int]] = {}
    for index, node in enumerate(nodes):
        sources = [source for source, *_ in node["inputs"]]
        if node["op"] == "null":
            name = node["name"]
            if name not in inputs:
                constant[index] = (name,) if name in trained else ()
            continue
        names = [name for source in sources for name in constant.get(source, ())]
        if all(source in constant for source in sources):
            constant[index] = tuple(names)
            continue
        for name in names:
            reads.setdefault(name, []).append(index)
    first: Dict[int, List[str]] = {}
    for name, (index, *_) in reads.items():
        first.setdefault(index, []).append(name)
    return [
        _Use(index, names, max(_end_of_turns(reads[name], reads.values()) for name in names))
        for index, names in sorted(first.items())
    ]


def _end_of_turns(own: Sequence[int], reads: Iterable[Sequence[int]]) -> int:
    """The last of a parameter's reads between two of one that is first read after it.

    That is how weights are read in the steps of a recurrence. A tied weight that is merely read
    again at the end of a network takes no turns: it counts where it is first read.
    """
    turns = [index for other in reads for index in own if own[0] < other[0] < index < other[-1]]
    return max(turns, default=own[0])


def _merge_recurrent(uses: Sequence[_Use]) -> List[_Use]:
    """Joins layers that take turns, and what is read between their turns.

    An unrolled decoder reads all of its cells' weights in its first step and again in each later
    one. No cell of it ends before the next begins, nor has its gradient before the first step's
    backward pass, so together they are one layer.
    """
    merged: List[_Use] = []
    for use in uses:
        if merged and use.node <= merged[-1].end:
            before = merged.pop()
            use = _Use(before.node, before.parameters + use.parameters, max(before.end, use.end))
        merged.append(use)
    return merged


def _common_name(parameters: Sequence[str], model_prefix: str) -> str:
    """Beginning that the names of a layer's parameters share, without the model's own prefix."""
    letters = zip(*[name[len(model_prefix) :] for name in parameters])
    shared = "".join(at[0] for at in itertools.takewhile(lambda at: len(set(at)) == 1, letters))
    return shared.rpartition("_")[0] or parameters[0][len(model_prefix) :]


def _crossing_elems(
    nodes: Sequence[Mapping[str, Any]],
    inputs: AbstractSet[str],
    layer_of: Sequence[int],
    shapes: Mapping[Tuple[int, int], Tuple[int, ...]],
) -> List[int]:
    """By layer, the elements computed from the inputs up to it that later layers read. `layer_of`
    is each node's layer. The inputs themselves do not count: every host can read them."""
    computed: Set[int] = set()
    last_reader: Dict[Tuple[int, int], int] = {}
    for index, node in enumerate(nodes):
        if node["op"] == "null":
            continue
        for source, output, *_ in node["inputs"]:
            if source in computed:
                last_reader[source, output] = layer_of[index]
                computed.add(index)
            elif nodes[source]["name"] in inputs:
                computed.add(index)
    crossing = [0] * (layer_of[-1] + 1)
    for (source, output), last in last_reader.items():
        for layer in range(layer_of[source], last):
            crossing[layer] += math.prod(shapes[source, output])
    return crossing


def _node_flops(
    index: int,
    node: Mapping[str, Any],
    shapes: Mapping[Tuple[int, int], Tuple[int, ...]],
) -> float:
    """Forward operations of one node. Matrix work is counted from the shapes; everything else,
    which only moves memory, counts one for each element that it writes."""
    operator = node["op"]
    if operator == "null":
        return 0.0
    sources = [shapes[source, output] for source, output, *_ in node["inputs"]]
    written = math.prod(shapes[index, 0])
    if operator == "Convolution":  # weight: output channels, input channels / groups, kernel
        return 2.0 * written * math.prod(sources[1][1:])
    if operator == "FullyConnected":  # weight: outputs, inputs
        return 2.0 * written * sources[1][1]
    if operator == "RNN":
        # Each step multiplies by every weight once; the biases among them are 0.2 %.
        steps, batch = sources[0][:2]
        return 2.0 * steps * batch * math.prod(sources[1])
    if operator == "batch_dot":
        axis = 1 if node.get("attrs", {}).get("transpose_a") in ("True", "1") else 2
        return 2.0 * written * sources[0][axis]
    return float(written)


_PIXELS = 224
_PIXELS_OF_INCEPTION = 299
"""Sides of the squares that the models' papers train with."""


def model(name: str, batch_size: int, compute_s: float) -> Model:
    """The model called `name`, for batches of `batch_size` images; no weight is allocated.
    `compute_s` is C, the time of a batch's forward and backward pass."""
    pixels = _PIXELS_OF_INCEPTION if name == "inceptionv3" else _PIXELS
    with mx.name.NameManager():  # the names, and so the keys, of a fresh script's first network
        block = vision.get_model(name)
    layers, parameters = trace(block, {"data": (batch_size, 3, pixels, pixels)})
    return Model(name, batch_size, compute_s, tuple(layers), tuple(parameters))
