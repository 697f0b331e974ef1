"""Weights with sparse gradients: only rows travel that a gradient has, and that have changed."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.averaged import averaged
from p3kv.frontends.torch.optimizers.optimizer_settings import BY_ROWS, class_of
from p3kv.frontends.torch.steps import parameters_of
from p3kv.frontends.torch.tensors import array_of
from p3kv.frontends.torch.values.bucket import Bucket, Gathered, Weight
from p3kv.frontends.torch.values.compiled import own_name
from p3kv.frontends.torch.values.copies import Copies, Then
from p3kv.frontends.torch.values.table_weight import TableWeight
from p3kv.worker.routes import RowsPull, RowsPush
from p3kv.worker.transfers import Transfer, WorkerKey

LAYOUT = "touched_rows"
"""That of keys of rows."""


def sparse_weights(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, by_servers: bool = True
) -> Dict[int, str]:
    """By id, the names of an optimizer's parameters whose gradients are sparse: weights of
    embeddings with `sparse=True`, and all that SparseAdam has.

    Raises NotSupportedError for an embedding that writes into its weight while it is read, if
    servers update that.
    """
    names = {id(parameter): own_name(name) for name, parameter in model.named_parameters()}
    takes_all = class_of(optimizer) is torch.optim.SparseAdam
    every = parameters_of(optimizer) if by_servers else averaged(optimizer)
    of_optimizer, own = {id(one) for one in every}, {*map(id, parameters_of(optimizer))}
    tables = {id(one) for one in every if isinstance(one, TableWeight)}
    by_rows = of_optimizer & own if takes_all else tables
    found = {at: names.get(at, "a parameter") for at in by_rows}
    for module in model.modules():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        at = id(module.weight)
        if at not in of_optimizer:
            continue
        if by_servers and module.max_norm is not None and module.weight.requires_grad:
            raise NotSupportedError(
                f"the embedding of '{names[at]}' has max_norm={module.max_norm}, by which it "
                "writes into its weight in each forward pass, and servers keep the weights: use "
                "max_norm=None, and divide what the embedding returns by its norm"
            )
        if module.sparse:
            found[at] = names[at]
    return found


def check_rows(optimizer: torch.optim.Optimizer, sparse: Mapping[int, str]) -> None:
    """Raises NotSupportedError for an optimizer that would change other rows than those of the
    gradient of a weight in `sparse`, or, as in torch, takes no sparse gradients at all."""
    kind = class_of(optimizer).__name__
    for group in optimizer.param_groups:
        name = next((sparse[id(one)] for one in group["params"] if id(one) in sparse), None)
        if name is None:
            continue
        more = [one for one in ("momentum", "weight_decay") if group.get(one)]
        if kind in BY_ROWS and not more:
            continue
        raise NotSupportedError(
            f"the gradient of '{name}' is sparse, and servers can't update single rows by "
            f"{' with '.join([kind, *more])}, which changes all rows in each step, or takes no "
            f"sparse gradients: use {', '.join(BY_ROWS)}, without momentum and weight_decay, if "
            "need be by a p3kv.torch.Optimizer of its own, or make it a torch.nn.Embedding with "
            "sparse=False"
        )


class RowsBucket(Bucket):
    """A parameter of which rows travel: to the servers those that the gradient has, and back those
    that any worker's gradient has changed."""

    by_rows = True

    def __init__(
        self,
        key: WorkerKey,
        parameters: Sequence[Tuple[str, torch.nn.Parameter]],
        copies: Copies,
    ) -> None:
        super().__init__(key, parameters, copies)
        (self._weight,) = self.weights
        self._rounds: Optional[Mapping[int, int]] = None
        """By server: the round whose rows are in the staging memory; None: there are none."""
        self._arriving: List[np.ndarray] = []
        """Numbers of rows that are in the staging memory and not in the parameter."""

    def exchange(
        self,
        begin: Callable[[Transfer], None],
        round_: int,
        step: int,
        pushes: bool,
        changes: Optional[Future[bool]],
        exact: bool,
        lands: bool,
        gathered: Optional[Gathered],
        weight: float,
    ) -> Then:
        """What begins, called with the source, the transfers that bring a value: a push if it
        `pushes`, and a pull of the rows that have changed if the value `lands`. A gradient is
        coalesced; a dense source has all rows. `gathered`: the gradient as it is on its device.
        `weight`: by what it counts."""
        key = self.key
        pulls = key.pulls
        number = key.next_pull() if lands else 0

        def done_pull(error: Optional[BaseException]) -> None:
            self._rounds = pull.rounds
            self.arrived(error)

        if not lands:
            self._rounds = dict.fromkeys(dict(key.runs), round_)
        else:
            # Rows that a codec has rounded before have not changed on the servers since.
            since = None if exact and not key.codecs.values.in_place else self._rounds
            self._arriving = []
            elements = array_of(self.staging).reshape(-1, key.row_elems)
            pull = RowsPull(key, round_, step, number, elements, done_pull)
            pull.exact, pull.on_rows = exact, self._arriving.append
            pull.rounds = dict(since or {})

        def begin_with(source: Optional[torch.Tensor]) -> None:
            if gathered is not None and source is gathered.flat:
                self.leaves_itself()
            if pushes:
                done = _has_left if lands else self.arrived
                rows = self._rows_of(source) if changes is None else None
                push = RowsPush(key, round_, step, rows, done)
                push.after_pulls, push.changes, push.weight = pulls, changes, weight
                begin(push)
            if lands:
                begin(pull)

        return begin_with

    def _rows_of(self, source: Optional[torch.Tensor]) -> Tuple[np.ndarray, np.ndarray]:
        """Numbers, which ascend, and elements, in the memory of `source`."""
        elems = self.key.row_elems
        if source is None or not self.key.size_elems:
            return np.empty(0, np.int64), np.empty((0, elems), self.key.numpy_dtype)
        if source.is_sparse:
            numbers = source.indices()[0].numpy()
            return numbers, array_of(source.values().contiguous()).reshape(len(numbers), elems)
        return np.arange(self.key.shape[0]), array_of(source).reshape(-1, elems)

    def _copy_one(self, weight: Weight) -> None:
        arrived, self._arriving = self._arriving, []
        weight.newest = torch.from_numpy(np.concatenate(arrived or [np.empty(0, np.int64)]))
        if self._changes is not None or len(weight.newest) == self.key.shape[0]:
            super()._copy_one(weight)  # the script may have written into other rows of a frozen one
            return
        to_device = self.copies.to_device
        rows = to_device(weight.staging.index_select(0, weight.newest))
        weight.parameter.data.index_copy_(0, to_device(weight.newest), rows)


class RowSums(RowsBucket):
    """A parameter whose gradient's rows are summed over all workers. Each row travels with one
    element more, which counts who has it: with a sum's rows come those of the last one, as zeros.
    """

    def __init__(
        self,
        key: WorkerKey,
        parameters: Sequence[Tuple[str, torch.nn.Parameter]],
        copies: Copies,
    ) -> None:
        super().__init__(key, parameters, copies)
        self.staging[:, -1] = 0
        self._weight.staging = self.staging[:, :-1].unflatten(1, self._weight.shape[1:])

    def _memory(self, shape: Tuple[int, ...], dtype: torch.dtype, copies: Copies) -> torch.Tensor:
        return super()._memory(counted(shape), dtype, copies)

    def gathered_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """A sparse gradient as it travels."""
        gradient = gradient.coalesce()
        values = gradient.values().flatten(1)
        with_count = torch.cat([values, values.new_ones(len(values), 1)], 1)
        return torch.sparse_coo_tensor(
            gradient.indices(), with_count, counted(tuple(gradient.shape)), is_coalesced=True,
            check_invariants=False,
        )  # fmt: skip

    def sums(self) -> torch.Tensor:
        """The sum of all workers' gradients, which has come: sparse, in the host's memory."""
        arrived, self._arriving = self._arriving, []
        numbers = torch.from_numpy(np.concatenate(arrived or [np.empty(0, np.int64)]))
        rows = self.staging.index_select(0, numbers)
        has = rows[:, -1] > 0
        values = rows[has, :-1].unflatten(1, self._weight.shape[1:])
        return torch.sparse_coo_tensor(
            numbers[has][None], values, self._weight.shape, is_coalesced=True,
            check_invariants=False,
        )  # fmt: skip


def counted(shape: Tuple[int, ...]) -> Tuple[int, int]:
    """That of rows which each have an element more."""
    return shape[0], math.prod(shape[1:]) + 1


def _has_left(error: Optional[BaseException]) -> None:
    """The pull of the rows that have changed ends the transfer; the push holds its rows' memory."""
