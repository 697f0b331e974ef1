"""States of optimizers that nest arrays in tuples, lists and dicts, as plain values and arrays."""

from __future__ import annotations

from typing import Any, Callable

from p3kv.errors import NotSupportedError


def take_apart(value: Any, keep: Callable[[Any], Any]) -> Any:
    """The structure of a state: plain values.

    `keep(one)` gives what stands for an array in it, a str or a dict of one item, and None for what
    is no array. The structure is None, what stands for an array, a list of structures for a tuple,
    or a dict that says what is in it. Raises NotSupportedError for what nothing stands for.
    """
    if value is None:
        return None
    kept = keep(value)
    if kept is not None:
        return kept
    if isinstance(value, tuple):
        return [take_apart(part, keep) for part in value]
    if isinstance(value, list):
        return {"list": [take_apart(part, keep) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[name, take_apart(part, keep)] for name, part in value.items()]}
    if isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise NotSupportedError(
        f"an optimizer's state has a {type(value).__name__}; it may have arrays, numbers, strs, "
        "tuples, lists and dicts"
    )


def put_together(structure: Any, array: Callable[[Any], Any]) -> Any:
    """The state that `take_apart` has taken apart; `array(kept)` gives the array for which `kept`
    stands."""
    if structure is None:
        return None
    if isinstance(structure, list):
        return tuple(put_together(part, array) for part in structure)
    if isinstance(structure, dict):
        if "list" in structure:
            return [put_together(part, array) for part in structure["list"]]
        if "dict" in structure:
            return {name: put_together(part, array) for name, part in structure["dict"]}
        if "value" in structure:
            return structure["value"]
    return array(structure)
