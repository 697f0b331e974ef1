"""Tables from names to classes: how a setting, or another process, chooses a class."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from typing import Any, Dict, Generic, Iterable, List, NamedTuple, Type, TypeVar, Union

from p3kv.common.words import did_you_mean
from p3kv.errors import ConfigError, in_one_line

MAX_NAME_CHARS = 64
"""Longest name of a class in a table."""
MAX_CHOICE_CHARS = 256
"""Longest text that chooses a class with parameters."""

T = TypeVar("T")
Plain = Union[bool, int, float, str]


class Choice(NamedTuple):
    """A class in a table: its name, and the parameters that it is made with."""

    name: str
    parameters: Dict[str, Plain] = {}  # noqa: RUF012  nobody changes it

    def __str__(self) -> str:
        """In messages: "'2bit' (threshold=0.5)"."""
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(self.parameters.items()))
        return f"{self.name!r} ({values})" if values else repr(self.name)


def choice_of(text: str, variable: str) -> Choice:
    """The choice that a setting spells: "topk", or "topk:share=0.01,exact=true".

    A value is a whole number, a number, true or false, or else text. Raises ConfigError, with the
    variable of the setting, for a text of another form.
    """
    name, colon, rest = text.partition(":")
    parameters: Dict[str, Plain] = {}
    for one in rest.split(",") if colon else ():
        parameter, equals, value = (part.strip() for part in one.partition("="))
        if not parameter.isidentifier() or not equals or not value or parameter in parameters:
            raise ConfigError(
                f"{variable} is {text!r}, in which {one!r} is not a parameter of its own; write a "
                "name, or name:parameter=value,parameter=value"
            )
        parameters[parameter] = _plain(value)
    return Choice(name.strip(), parameters)


def _plain(text: str) -> Plain:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def import_modules(names: Iterable[str], variable: str) -> None:
    """Imports modules of the user's, which register what they define.

    Raises ConfigError, with the variable that names them, where one can't be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"can't import {name}, which {variable} names: {in_one_line(error)}"
            ) from error


class Registry(Generic[T]):
    """Classes of one kind by name.

    A user's own class is registered by a module that P3KV_PLUGINS names, in every process that has
    to make one. Only names and plain parameters travel between processes.
    """

    def __init__(self, kind: str, needed_by: str, setting: str = "", **members: Type[T]) -> None:
        """`kind` is what messages call a member, for example "placement". `needed_by` says which
        processes make it, and `setting` which variables choose one."""
        self._kind = kind
        self._needed_by = needed_by
        self._setting = setting
        self._members: Dict[str, Type[T]] = dict(members)

    def register(self, name: str, member: Type[T]) -> None:
        """Lets this process choose the class by a name.

        Raises ConfigError for a name that another class has, that is empty or too long, or that has
        a colon, behind which settings have parameters.
        """
        if not 0 < len(name) <= MAX_NAME_CHARS or ":" in name:
            raise ConfigError(
                f"the name of a {self._kind} has from 1 to {MAX_NAME_CHARS} letters, and no colon: "
                f"{name!r}"
            )
        if self._members.setdefault(name, member) is not member:
            raise ConfigError(f"there is another {self._kind} called {name!r}; choose another name")

    def names(self) -> List[str]:
        """The names of all classes, in alphabetical order."""
        return sorted(self._members)

    def find(self, name: str) -> Type[T]:
        """The class with this name; ConfigError for a name that nobody has registered here."""
        if name not in self._members:
            setting = f"Set {self._setting} to one of these, or " if self._setting else "Set "
            meant = did_you_mean(name, self.names()) or "."
            raise ConfigError(
                f"there is no {self._kind} {name!r}, only {', '.join(self.names())}{meant} "
                f"{setting}P3KV_PLUGINS, in the environment of {self._needed_by}, to the module "
                "that registers it."
            )
        return self._members[name]

    def make(self, choice: Union[Choice, str], *arguments: Any) -> T:
        """An object of the class that is chosen, also by a setting's text, made with `arguments`
        and its own parameters.

        Raises ConfigError for a name that nobody has registered here, and for parameters that the
        class does not take; for their values, what the class raises.
        """
        if isinstance(choice, str):
            choice = choice_of(choice, self._setting)
        member = self.find(choice.name)
        takes = inspect.signature(member)
        try:
            takes.bind(*arguments, **choice.parameters)
        except TypeError as error:
            own = list(takes.parameters)[len(arguments) :]
            unknown = [name for name in choice.parameters if name not in own]
            meant = did_you_mean(unknown[0], own) if unknown else ""
            raise ConfigError(
                f"the {self._kind} {choice} is wrong ({error}); it takes "
                f"{', '.join(own) or 'no parameters'}{meant}"
            ) from None
        return member(*arguments, **choice.parameters)
