"""Refusals to clip by the norm of all gradients where optimizers run on the servers."""

from __future__ import annotations

from typing import Any, NoReturn, Sequence, Tuple

from p3kv.errors import NotSupportedError


def refuse_part_of_a_step(keys: Any) -> NoReturn:
    """Raises NotSupportedError: the call's keys are of a step that was clipped without them."""
    raise NotSupportedError(
        f"key {keys!r} is pushed after a step has been clipped without it. With "
        "kv.clip_global_norm each call of push or pushpull is a whole step: give it the lists of "
        "all keys and gradients. gluon's Trainer and Module need nothing"
    )


def check_apart(known: Sequence[Tuple[Any, ...]]) -> None:
    """Raises NotSupportedError where the new value of a key is to be written into an array that
    another key of the step needs, too: the second operation would wait for the first, and the first
    for the gradients of the step.

    `known`: keys with their sources and their targets.
    """
    written = {id(target): key for key, _, targets in known for target in targets}
    for key, sources, targets in known:
        if any(written.get(id(array), key) is not key for array in (*sources, *targets)):
            raise NotSupportedError(
                f"{key.called} and another key of the call have an array in common, into which a "
                "new value is to be written. With kv.clip_global_norm no value comes before all "
                "gradients of the step: give each key arrays of its own"
            )
