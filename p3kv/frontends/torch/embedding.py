"""The embedding whose table servers hold."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch

from p3kv.common.seeded_rows import seeded_rows
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.table import Table
from p3kv.frontends.torch.values.table_weight import TableWeight
from p3kv.wire.messages import SeededRows
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")
_DTYPES = (torch.float32, torch.float64)


class Embedding(torch.nn.Embedding):
    """As `torch.nn.Embedding(num_embeddings, embedding_dim, padding_idx, sparse=True)`, but the
    servers of the job hold the rows and their optimizer's states, and no worker does.

    A forward pass asks for the rows of its ids, each once, and waits for them; their gradient
    leaves in `backward`, and the next pass gets the rows after that step. The servers make the rows
    from `seed`, normal or `uniform` around 0 with the standard deviation `std`: the same on any
    number of servers. The row of `padding_idx` is 0.

    The optimizer that `p3kv.torch.Optimizer` attaches must have the weight, and be one that servers
    run by rows. `state_dict()` leaves the weight out. In a process that belongs to no job, the
    table is in this process. To be used from one thread.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int] = None,
        *,
        std: float = 1.0,
        uniform: bool = False,
        seed: int = 0,
        cache_rows: int = 0,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        """`cache_rows`: how many rows each worker keeps, those that it has used last. The servers
        send such a row again when it has changed.

        Raises ConfigError for a number that can't be right."""
        element = torch.zeros((), device=device, dtype=dtype)
        if element.dtype not in _DTYPES:
            raise ConfigError(
                f"a p3kv.torch.Embedding is float32 or float64, and not {element.dtype}"
            )
        if not 0 <= std < float("inf") or not 0 <= seed < 2**64 or cache_rows < 0:
            raise ConfigError(
                f"std={std}, seed={seed}, cache_rows={cache_rows}: use a number from 0 on for each"
            )
        shape = int(num_embeddings), int(embedding_dim)
        padding = None if padding_idx is None else padding_idx % max(1, shape[0])
        initial = SeededRows(seed, float(std), uniform, -1 if padding is None else padding)
        joined = this_process.joined()
        given = element.expand(shape) if joined else _made(shape, element, initial)
        super().__init__(*shape, padding_idx, sparse=True, _weight=given)
        if joined:
            self.weight = TableWeight(shape, element, initial, min(cache_rows, shape[0]))

    @torch._disable_dynamo
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of these ids; IndexError for an id that is none of the table's."""
        weight = self.weight
        if not isinstance(weight, TableWeight):
            return super().forward(input)
        numbers, places = np.unique(_ids(input), return_inverse=True)
        self._check(numbers)
        rows = self._table().rows(numbers).to(weight.device)
        at = torch.from_numpy(places.reshape(-1)).to(weight.device).reshape(input.shape)
        of_table = torch.from_numpy(numbers).to(weight.device)
        found: torch.Tensor = _Lookup.apply(weight, rows, at, of_table, self.padding_idx)
        return found

    @torch._disable_dynamo
    def prefetch(self, ids: torch.Tensor) -> None:
        """Has the rows of these ids come before the next forward pass, which reads them; returns at
        once.

        To be called after the last forward pass of a step, for the next step's: the servers send
        the rows as soon as they have made this step. Raises IndexError as `forward`.
        """
        if isinstance(self.weight, TableWeight):
            numbers = np.unique(_ids(ids))
            self._check(numbers)
            self._table().prefetch(numbers)

    def stats(self) -> Dict[str, int]:
        """Counts of this worker so far; empty in a process that belongs to no job.

        `rows`: rows that forward passes have read, each once a pass; `rows_prefetched`: those of
        them that had been asked for before; `rows_pulled`: rows that servers were asked for;
        `waits`: passes for which a row was not there yet. Of rows that were asked for,
        `cache_hits` were in the cache and have not travelled, `cache_changed` have travelled since
        they had changed, `cache_misses` were not there; `cache_evictions` have made room.
        """
        return dict(self._table().stats) if isinstance(self.weight, TableWeight) else {}

    def _table(self) -> Table:
        table: Optional[Table] = self.weight.table
        if table is None:
            raise NotSupportedError(
                "a p3kv.torch.Embedding was called before its rows are on the servers: give its "
                "weight to an optimizer, and call p3kv.torch.Optimizer(model, optimizer) before"
            )
        return table

    def _check(self, numbers: np.ndarray) -> None:
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < self.num_embeddings:
            raise IndexError(
                f"ids are from {numbers[0]} to {numbers[-1]}, and the table has the rows 0 to "
                f"{self.num_embeddings - 1}"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to`, `double` and the like: of the table, an element."""
        weight = self.weight
        if not isinstance(weight, TableWeight):
            return super()._apply(fn, recurse)
        element = fn(torch.zeros((), dtype=weight.dtype, device=weight.device))
        if element.dtype not in _DTYPES:
            raise NotSupportedError(
                f"a p3kv.torch.Embedding is float32 or float64, and was to become {element.dtype}: "
                "convert the other layers alone, or train with autocast"
            )
        weight.place(element)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not isinstance(self.weight, TableWeight):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        if self.weight.table is not None:
            self.weight.table.say_left_out()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *more: List[str]
    ) -> None:
        if not isinstance(self.weight, TableWeight):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *more)
        elif f"{prefix}weight" in state_dict:
            raise NotSupportedError(
                f"'{prefix}weight' can't be loaded into a p3kv.torch.Embedding, whose rows are on "
                "the servers: leave it out of the state_dict, and go on from a checkpoint"
            )


class _Lookup(torch.autograd.Function):
    """Rows that are here by their places; its gradient is one of the table, by ids."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: TableWeight,
        rows: torch.Tensor,
        places: torch.Tensor,
        numbers: torch.Tensor,
        padding: Optional[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(places, numbers)
        ctx.shape, ctx.padding = weight.shape, padding
        return torch.nn.functional.embedding(places, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        """As torch's own of an embedding: rows in the order of the ids, which may repeat."""
        places, numbers = ctx.saved_tensors
        ids, rows = numbers[places.reshape(-1)], gradient.reshape(-1, ctx.shape[1])
        if ctx.padding is not None:
            kept = ids != ctx.padding
            ids, rows = ids[kept], rows[kept]
        of_table = torch.sparse_coo_tensor(
            ids.reshape(1, -1), rows, ctx.shape, check_invariants=False
        )
        return of_table, None, None, None, None


def _ids(ids: torch.Tensor) -> np.ndarray:
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids are int32 or int64, and these are {ids.dtype}")
    array: np.ndarray = ids.detach().reshape(-1).cpu().numpy().astype(np.int64, copy=False)
    return array


def _made(shape: Tuple[int, int], element: torch.Tensor, initial: SeededRows) -> torch.Tensor:
    """All rows, in a process that belongs to no job: those that servers would make."""
    rows = seeded_rows(np.arange(shape[0]), shape[1], initial.seed, initial.std, initial.uniform)
    if initial.zero_row >= 0:
        rows[initial.zero_row] = 0
    return torch.from_numpy(rows).to(element.device, element.dtype)
