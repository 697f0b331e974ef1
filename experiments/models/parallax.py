"""The models of Parallax (EuroSys'19, table 1) with their tables of rows, SCALE times smaller.

Of dense arrays the elements are divided by SCALE, of tables the rows. LM is an LSTM of 2,048 units
with a projection to 512, and two tables of 793,470 words. NMT is an encoder and a decoder of LSTMs
of 1,024 units, and two tables of 36,572 words. The sizes are those of table 1. What a worker
touches is from its earlier form (arXiv:1808.02621, table 1): 6.5 M of 814 M elements for LM, and
7 M of 75 M for NMT.

C is that of one of the paper's GPUs: throughput with 48 of them, by how many times one that is
(arXiv:1808.02621, section 7 and tables 1 and 4): 276,000 words/s and 9.4 for LM, 191,000 and 17.1
for NMT, whose sentences are taken to have 25 words, 8,100 images/s and 39.8 for ResNet-50.
"""

from __future__ import annotations

import functools
from typing import Mapping, NamedTuple, Sequence, Tuple

from experiments.models.models import load
from p3kv.report.forecast import Layer, Model, Parameter

NAMES = ("lm", "nmt", "resnet50")
SCALE = 16
LINK_BIT_S = 10e9
"""Of each host, in each direction, before SCALE. The paper has InfiniBand with 100 Gbit/s; over
this LM sends for as long as it computes, and NMT twice as long."""
_LM_ROWS, _NMT_ROWS = 793_470 // SCALE, 36_572 // SCALE
_LSTM_ELEMS = 4 * 1024 * (1024 + 1024)


class Table(NamedTuple):
    """A table of which each worker touches some rows in an iteration."""

    name: str
    rows: int
    columns: int
    touched: int


class SparseModel(NamedTuple):
    """A model of which some layers are tables; these are parameters of `model`, too, by name."""

    title: str
    unit: str
    """Of what a batch consists."""
    model: Model
    tables: Tuple[Table, ...]

    @property
    def alpha(self) -> float:
        """The share of elements that a worker uses in an iteration (the paper's alpha_model)."""
        unused = sum((table.rows - table.touched) * table.columns for table in self.tables)
        return 1 - unused / self.model.elems

    def with_alpha(self, alpha: float) -> SparseModel:
        """The same model with as many touched rows as give this alpha, at least one in each
        table."""
        of_tables = sum(table.rows * table.columns for table in self.tables)
        share = 1 - (1 - alpha) * self.model.elems / of_tables
        tables = [one._replace(touched=max(1, round(share * one.rows))) for one in self.tables]
        return self._replace(tables=tuple(tables))


@functools.lru_cache(maxsize=None)
def sparse_model(name: str) -> SparseModel:
    """The model called `name`, one of NAMES, with C as in the paper."""
    if name == "lm":
        tables = [Table("embedding", _LM_ROWS, 512, 155), Table("softmax", _LM_ROWS, 512, 638)]
        dense = {"lstm": 4 * 2048 * 1024, "projection": 2048 * 512}
        return _model(name, "LM", 128 * 20, 128 * 20 * 9.4 / 276e3, tables[:1], dense, tables[1:])
    if name == "nmt":
        tables = [Table(one, _NMT_ROWS, 1024, 213) for one in ("source", "target")]
        encoder = {f"encoder{number}": _LSTM_ELEMS for number in range(3)}
        decoder = {f"decoder{number}": _LSTM_ELEMS for number in range(3)}
        decoder.update(attention=6 * 1024 * 1024, softmax=36_572 * 1024)
        compute_s = 128 * 25 * 17.1 / 191e3
        return _model(name, "NMT", 128 * 25, compute_s, tables[:1], encoder, tables[1:], decoder)
    of = load(name)
    arrays = {one.name: _scaled(one) for one in of.parameters}
    layers = [
        layer._replace(parameters=tuple(arrays[one.name] for one in layer.parameters))
        for layer in of.layers
    ]
    scaled = of._replace(
        batch_size=64, compute_s=64 * 39.8 / 8.1e3, layers=tuple(layers),
        parameters=tuple(arrays.values()),
    )  # fmt: skip
    return SparseModel("ResNet-50", "images", scaled, ())


def _model(
    name: str,
    title: str,
    batch_size: int,
    compute_s: float,
    *parts: Sequence[Table] | Mapping[str, int],
) -> SparseModel:
    """A model of tables, and of dense arrays by their elements before SCALE, in forward order. Work
    goes by the elements that are used."""
    layers, tables = [], []
    for part in parts:
        if isinstance(part, Mapping):
            for array, elems in part.items():
                one = Parameter(array, (elems // SCALE,))
                layers.append(Layer(array, (one,), float(one.elems)))
            continue
        for table in part:
            one = Parameter(table.name, (table.rows, table.columns))
            layers.append(Layer(table.name, (one,), float(table.touched * table.columns)))
            tables.append(table)
    parameters = tuple(one for layer in layers for one in layer.parameters)
    model = Model(name, batch_size, compute_s, tuple(layers), parameters)
    return SparseModel(title, "words", model, tuple(tables))


def _scaled(parameter: Parameter) -> Parameter:
    return Parameter(parameter.name, (max(1, parameter.elems // SCALE),))
