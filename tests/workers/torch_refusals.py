"""Checks that p3kv.torch refuses what it should; for the scripts beside this one."""

from typing import Any, Callable, Tuple, Type, Union

from p3kv.errors import NotSupportedError, P3Error


def refused(
    words: str,
    call: Callable[..., Any],
    *arguments: Any,
    kind: Union[Type[P3Error], Tuple[Type[P3Error], ...]] = NotSupportedError,
) -> None:
    try:
        call(*arguments)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")
