"""Says what full collections look at, after one has freed what the script has made and dropped."""

import p3kv  # noqa: F401, I001
import gc
import weakref

import mxnet as mx


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


store = mx.kv.create("p3")
cycle = weakref.ref(Cycle())
gc.collect()
assert cycle() is None
print(f"collections look at {len(gc.get_objects())} objects and leave out {gc.get_freeze_count()}")
