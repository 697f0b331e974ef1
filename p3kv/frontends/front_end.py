"""The interface between p3kv and a framework's front end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, List, Mapping, Optional, Protocol, Sequence, Type

from p3kv.common.words import Words
from p3kv.config import Launch
from p3kv.report.forecast import Model
from p3kv.server.optimizer import MakeOptimizer

MakeModel = Callable[[int, float], Model]
"""Makes a model for a size of batches, and C, the seconds of a forward and backward pass."""


class KeyStore(Protocol):
    """A store of keys that a launcher serves to its processes. Each method may raise RuntimeError
    when the store does not answer."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """A key's value; waits until it is set. Raises RuntimeError after a time."""

    def wait(self, keys: List[str]) -> None:
        """Waits until all keys are set. Raises RuntimeError after a time."""

    def check(self, keys: List[str]) -> bool:
        """Whether all keys are set."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Sets a key that has a value, or none where `expected` is empty."""


class FrontEnd(ABC):
    """A framework's front end, as processes know it that have not imported the framework.

    Its module must not import the framework: `import p3kv` imports the module in every process.
    """

    name: str
    """Name of the package that users import, and of the front end in messages."""
    words: Words
    aliases: Mapping[str, str]
    """The framework's own environment variable for a setting, by the setting's name."""
    prefix: str
    """Beginning of the names of the framework's own environment variables."""
    make_optimizer: Type[MakeOptimizer]
    """Class that makes the framework's optimizers on servers."""
    model_names: Sequence[str] = ()
    """The names of `known_models`, for shells to complete without an import of the framework."""

    @abstractmethod
    def attach(self) -> None:
        """Registers the store with the framework, which has just been imported."""

    @abstractmethod
    def how_to_install(self) -> str:
        """Advice for a script whose import of the framework does not find it."""

    def why_not(self) -> str:
        """Says why the framework can't be imported here though it may be installed, and what to do;
        empty by default."""
        return ""

    @abstractmethod
    def came_too_early(self, role: str) -> Optional[str]:
        """Why this process can't be a scheduler or server, because the framework was imported
        before p3kv; None if it can."""

    def advice_for(self, error: BaseException) -> str:
        """Says what to do about an error of the framework's own, in which a script
        ends; empty by default."""
        return ""

    def devices(self) -> str:
        """Devices on which the framework installed here can compute, in words. Imports it."""
        return ""

    def take_native_role(self, launch: Launch, address: str) -> None:  # noqa: B027  has a default
        """Has the framework's own store run in this process, for a comparison; by default there
        is none.

        `launch` is the process's place in the job. It listens at `address`. A scheduler or server
        serves its job here; a worker goes on.
        """

    def launcher_store(self, host: str, port: int, timeout_s: float) -> Optional[KeyStore]:
        """Connects to the store that the framework's own launcher serves; by default there is none.

        Imports the framework; None if that is not there. Waits so long for the store, and for each
        key in it. Raises RuntimeError when the store does not answer.
        """
        return None

    def known_models(self) -> Mapping[str, MakeModel]:
        """The models that the framework brings with it, by name; none by default.

        Imports the framework, and raises ImportError if that fails.
        """
        return {}
