"""The file in which 'p3kv tune' leaves what it has chosen, for 'p3kv launch --tuned'."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Dict, Mapping, Optional

import msgspec
from msgspec import Meta

from p3kv.common.words import counted
from p3kv.config.settings import MAX_SLICE_ELEMS, variable_of
from p3kv.config.unknown import told_of
from p3kv.errors import ConfigError

if sys.version_info >= (3, 9):
    from typing import Annotated
else:
    from typing_extensions import Annotated

_MAX_BYTES = 65536
_Count = Annotated[int, Meta(ge=1, le=65535)]


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen, and the job for which it was measured."""

    servers_per_host: _Count
    workers: _Count
    hosts: _Count
    slice_size: Optional[Annotated[int, Meta(ge=1, le=MAX_SLICE_ELEMS)]] = None
    """As in `Settings`."""

    @property
    def in_words(self) -> str:
        """The job for which it was measured."""
        return f"{counted(self.workers, 'worker')} on {counted(self.hosts, 'host')}"

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """Reads a file; ConfigError for one that can't be read, or is none of p3kv tune's."""
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=cls)
        except OSError as error:
            raise ConfigError(f"can't read '{path}': {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"'{path}' is no file of p3kv tune's: {error}; write it with 'p3kv tune --write'"
            ) from None

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all; ConfigError where it can't be written."""
        self.check_writable(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        text = msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
        try:
            unfinished.write_bytes(text)
            os.replace(unfinished, path)
        except OSError as error:
            raise ConfigError(f"can't write '{path}': {error.strerror}") from None

    @classmethod
    def check_writable(cls, path: Path) -> None:
        """Raises ConfigError where `write` could not write, or would replace another file."""
        if path.exists():
            cls.read(path)
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ConfigError(f"can't write '{path}': {error.strerror}") from None

    def environment(self, environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
        """This process's environment as the processes of a tuned job get it: what the user has set
        there stays."""
        size = {} if self.slice_size is None else {variable_of("slice_size"): str(self.slice_size)}
        return {**size, **environ, **told_of(environ)}
