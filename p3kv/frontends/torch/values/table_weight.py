"""The parameter that stands for a table whose rows servers hold."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.values.watched import NEED_NO_VALUE, name_of
from p3kv.wire.messages import SeededRows

_NEED_NO_VALUE = {*NEED_NO_VALUE, torch.Tensor.requires_grad_, torch.Tensor.__hash__}
_ASK_WHAT_IT_IS = {
    "is_complex", "is_cpu", "is_cuda", "is_floating_point", "is_meta", "is_mps", "is_nested",
    "is_quantized", "is_sparse_csr", "is_xla", "is_xpu", "itemsize", "retains_grad",
}  # fmt: skip


class TableWeight(torch.nn.Parameter):
    """Has the table's shape and the gradient's rows, and memory for one element. Whoever reads it
    is told that its rows are not here."""

    table: Any = None
    """What asks the servers for rows, once an optimizer has the parameter."""
    initial: SeededRows
    cache_rows: int

    def __new__(
        cls, shape: Tuple[int, int], element: torch.Tensor, initial: SeededRows, cache_rows: int
    ) -> TableWeight:
        """`element` has the table's dtype and device."""
        made: TableWeight = torch.Tensor._make_subclass(cls, element.expand(shape), True)
        made.initial, made.cache_rows = initial, cache_rows
        return made

    def place(self, element: torch.Tensor) -> None:
        """Has rows be of the dtype and on the device of `element` from now on."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = element.expand(self.shape)

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Tuple[type, ...],
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        if function in (torch.full_like, torch.zeros_like) and isinstance(args[0], TableWeight):
            # The first state of an optimizer that makes it on workers, too: Adagrad.
            weight, *more = args
            return function(weight._element(), *more, **(kwargs or {})).expand(weight.shape)
        if function not in _NEED_NO_VALUE and name_of(function) not in _ASK_WHAT_IT_IS:
            read = next((one.table for one in args if isinstance(one, TableWeight)), None)
            called = "the weight" if read is None else f"the weight '{read.name}'"
            raise NotSupportedError(
                f"{called} of a p3kv.torch.Embedding was used by {name_of(function)}, and its "
                "rows are on the servers: call the embedding with ids, under torch.no_grad() if "
                "nothing is to be trained; std= and seed= initialise it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def _element(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.zeros((), dtype=self.dtype, device=self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TableWeight{tuple(self.shape)}"

    def __deepcopy__(self, memo: Any) -> TableWeight:
        if self.table is not None:
            raise NotSupportedError(
                "a p3kv.torch.Embedding can't be copied once an optimizer has it: its rows are on "
                "the servers"
            )
        copied = TableWeight(self.shape, self._element(), self.initial, self.cache_rows)
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupportedError(
            "a p3kv.torch.Embedding can't be pickled: its rows are on the servers. Save the "
            "model's state_dict(), which leaves it out, and have checkpoints for the table"
        )
