"""The order in which gluon's parameters are read.

MXNet does not tell a store the forward order: gluon's Trainer sorts parameters by name. But gluon
reads `Parameter.data` in forward order, and a hybridized block reads it in the order of its graph's
inputs; a tied parameter counts where it is read first.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Dict, List, MutableMapping

from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from p3kv.store.forward_order import ForwardReads
from p3kv.wire.messages import Key


class GluonReads(ForwardReads):
    """Notes the order in which gluon parameters are first read while autograd records."""

    def __init__(self) -> None:
        self._reads: MutableMapping[gluon.Parameter, None] = weakref.WeakKeyDictionary()
        self._unpatched: Dict[str, Any] = {}

    def start(self) -> None:
        """Begins to record, unless it does already; costs a call for each read until `stop`."""
        if not self._unpatched:
            for name in ("data", "row_sparse_data"):
                self._patch(name)

    def _patch(self, name: str) -> None:
        unpatched = self._unpatched[name] = getattr(gluon.Parameter, name)

        @functools.wraps(unpatched)
        def read(parameter: gluon.Parameter, *arguments: Any, **more: Any) -> NDArray:
            if parameter not in self._reads and autograd.is_recording():
                self._reads[parameter] = None
            return unpatched(parameter, *arguments, **more)

        setattr(gluon.Parameter, name, read)

    def stop(self) -> None:
        """Restores gluon."""
        for name, unpatched in self._unpatched.items():
            setattr(gluon.Parameter, name, unpatched)
        self._unpatched.clear()

    def order(self, keys_by_array: Dict[int, Key]) -> List[Key]:
        """Keys in the order of their first reads. `keys_by_array` gives the key for the `id` of
        each array that the store was initialised with; parameters of other stores are left out."""
        order: Dict[Key, None] = {}
        for parameter in list(self._reads):
            for array in parameter._data or ():
                key = keys_by_array.get(id(array))
                if key is not None:
                    order.setdefault(key)
        return list(order)


FORWARD_READS = GluonReads()
"""The first forward pass comes before the store, so reads are noted from the import on."""
