"""Tables from names to classes: how a setting, or another process, chooses a class."""

from __future__ import annotations

from typing import Dict, Generic, List, Type, TypeVar

from p3kv.errors import ConfigError

MAX_NAME_CHARS = 64
"""Longest name of a class in a table."""

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name.

    A user's own class is registered by a module that P3KV_PLUGINS names, in every process that has
    to make one. Only names travel between processes.
    """

    def __init__(
        self, kind: str, needed_by: str, by_setting: bool = True, **members: Type[T]
    ) -> None:
        """`kind` is what messages call a member, for example "placement". `needed_by` says which
        processes make it. `by_setting` says whether a setting of this name chooses one."""
        self._kind = kind
        self._needed_by = needed_by
        self._by_setting = by_setting
        self._members: Dict[str, Type[T]] = dict(members)

    def register(self, name: str, member: Type[T]) -> None:
        """Lets this process choose the class by a name.

        Raises ConfigError for a name that another class has, or that is empty or too long.
        """
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise ConfigError(
                f"the name of a {self._kind} has from 1 to {MAX_NAME_CHARS} letters: {name!r}"
            )
        if self._members.setdefault(name, member) is not member:
            raise ConfigError(f"there is another {self._kind} called {name!r}; choose another name")

    def names(self) -> List[str]:
        """The names of all classes, in alphabetical order."""
        return sorted(self._members)

    def find(self, name: str) -> Type[T]:
        """The class with this name; ConfigError for a name that nobody has registered here."""
        if name not in self._members:
            setting = f"P3KV_{self._kind.upper()} to one of these, or " if self._by_setting else ""
            raise ConfigError(
                f"there is no {self._kind} {name!r}, only {', '.join(self.names())}. Set "
                f"{setting}P3KV_PLUGINS, in the environment of {self._needed_by}, to the module "
                "that registers it."
            )
        return self._members[name]
