"""Refusals of optimizers and pushes of one store: features are named, and the table is asked. Each
function raises what `WorkerStore.combine` raises."""

from __future__ import annotations

from typing import Optional

from p3kv import config
from p3kv.codecs import GRADIENTS, VALUES, codec_of
from p3kv.common.combinations import Feature
from p3kv.common.registry import import_modules
from p3kv.consistency import make_consistency
from p3kv.store.script_optimizer import ScriptOptimizer
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

_WORKERS = 2
"""Those of a job that the user may start next."""


def check_choices_alone(consistency: Optional[str]) -> None:
    """In a process that belongs to no job: raises ConfigError for a store's rule, or one of the
    settings, or for codecs, that a job would refuse. None: the settings' rule."""
    import_modules(config.plugins(), "P3KV_PLUGINS")
    settings = config.current()
    make_consistency(settings.consistency if consistency is None else consistency, _WORKERS)
    for direction in (GRADIENTS, VALUES):
        codec_of(settings, direction)


def check_optimizer(
    own: WorkerStore, new: ScriptOptimizer, before: Optional[ScriptOptimizer]
) -> None:
    """Refuse an optimizer that can't run, or not after the one before."""
    features = {Feature.OPTIMIZER}
    if not new.predicts or new.needs_whole_tensors:
        features.add(Feature.NO_PREDICTION)
    if new.momentum is None:
        features.add(Feature.OTHER_THAN_SGD)
    after = []
    if new.shares_numbers:
        features.add(Feature.SHARES_NUMBERS)
    if before is not None and new.needs_whole_tensors != before.needs_whole_tensors:
        features.add(Feature.OTHER_CUT)
        after.append(before.name)
    spread_out = own.keys_on_several_servers()
    if new.needs_whole_tensors:
        features.add(Feature.WHOLE_TENSORS)
        if spread_out:
            features.add(Feature.SPREAD_OUT)
            first, *_ = spread_out
            servers = len(first.runs)
            after.append(f"{first.called} was initialised, which lies on {servers} servers")
    said = f", set after {' and after '.join(after)}" if after else ""
    own.combine(features, f"the optimizer {new.name}{said}")


def check_first_push(
    own: WorkerStore, key: WorkerKey, optimizer: Optional[ScriptOptimizer]
) -> None:
    """Refuse a key that can't be pushed at all."""
    if optimizer is None:
        what = f"{key.called} is pushed to a store without an optimizer"
        own.combine({Feature.NO_OPTIMIZER}, what)
    elif "float" not in key.dtype:
        what = f"{key.called} of {key.dtype} is pushed to a store with an optimizer"
        own.combine({Feature.INTEGERS, Feature.OPTIMIZER}, what)


def check_no_gradient(own: WorkerStore, key: WorkerKey, optimizer: ScriptOptimizer) -> None:
    """Refuse a key without a gradient here, where the next update depends on whether any worker has
    one."""
    what = f"this worker has no fresh gradient of {key.called}, which {optimizer.name} updates"
    own.combine({Feature.SHARES_NUMBERS, Feature.NO_GRADIENT}, what)


def check_clipping(own: WorkerStore) -> None:
    """Refuse clipped steps while the servers have no optimizer."""
    own.combine({Feature.CLIPPING, Feature.NO_OPTIMIZER}, "the step is to be clipped")
