"""Takes part in checkpoints: copies what this server keeps at the end of a step, and writes it."""

from __future__ import annotations

from typing import Collection, Dict, Iterable, Mapping, Optional

import numpy as np
from msgspec.structs import replace

from p3kv.checkpoints import Contents, CutOfKey, KeyOutline, Outline, Place, Writer, marks
from p3kv.errors import ConfigError, ProtocolError
from p3kv.server.engine import Key, RowsKey, ServerSlice, Unit
from p3kv.server.optimizer import WHOLE, State
from p3kv.server.workers import Workers
from p3kv.wire.fields import Header
from p3kv.wire.header import Kind
from p3kv.wire.loop import Loop
from p3kv.wire.messages import Checkpoint, DeclaredKey, StoreAtCut, Written, encode


class _Cut:
    """Copies of a key in a round on this server, as far as its slices have ended the round."""

    def __init__(self, declared: DeclaredKey, round: int, whole: bool, slices: int) -> None:
        self.declared = declared
        self.round = round
        self.whole = whole
        self.missing = slices
        self._values: Dict[int, np.ndarray] = {}
        self._states: Dict[int, State] = {}

    def add(self, offset: int, value: np.ndarray, state: Optional[State]) -> None:
        """Keeps a copy of a slice's value, and its state, or that of the whole tensor."""
        self._values[offset] = value
        if state is not None:
            self._states[offset] = state
        self.missing -= 1

    @property
    def complete(self) -> CutOfKey:
        """All of it, once nothing is missing."""
        key = self.declared
        states = [self._states[offset] for offset in sorted(self._states)]
        first = states[0] if states else State({}, {})
        arrays = [[state.elements[name] for state in states] for name in first.elements]
        outline = KeyOutline(
            key.store, key.key, key.name, key.shape, key.dtype, key.layout, key.runs, self.whole,
            first.numbers if states else None,
            [
                (name, array.dtype.name, list(array.shape) if self.whole else [_elems(parts)])
                for (name, array), parts in zip(first.elements.items(), arrays)
            ],
        )  # fmt: skip
        return CutOfKey(outline, [self._values[offset] for offset in sorted(self._values)], arrays)


class _Open:
    """A checkpoint of which something is still to be copied."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.cuts: Dict[int, _Cut] = {}
        self.missing = 0
        """Slices, and keys of rows."""


class Checkpoints:
    """Copies each slice when it ends the round that worker rank 0 has named, and writes the copies.

    Rank 0 asks for a checkpoint before it pushes for any later round, so no slice has ended a later
    one. A round that has ended is copied at once, any other when it ends: no worker waits. The file
    is written by a thread. Rank 0 asks for the next checkpoint when all servers have answered.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        place: Place,
        folder: Optional[str],
        keys: Mapping[int, Key],
        workers: Workers,
        loop: Loop,
    ) -> None:
        """`folder` is where files are to be written, if the job has checkpoints: this server's mark
        is left there.

        Raises ConfigError if files can't be written there.
        """
        self.open: Optional[_Open] = None
        self._place = place
        self._folder = folder
        self._keys = keys
        self._workers = workers
        self._writes = False
        if folder is not None:
            _leave_mark(folder, place)
        self._writer = Writer(lambda step, problem: loop.call_soon(self._written, step, problem))

    def begin(self, checkpoint: Checkpoint) -> None:
        """Begins a checkpoint; ProtocolError for one that can't be right."""
        if self.open is not None or self._writes:
            raise ProtocolError("it asked for a checkpoint before it had the last one")
        if self._folder is None:
            raise ProtocolError("it asked for a checkpoint in a job that has none")
        self.open = _Open(checkpoint)
        for store in checkpoint.stores:
            for key_id, round_ in store.rounds:
                self._begin_key(store, key_id, round_)
        self._write_if_complete()

    def unit_ended(self, unit: Unit) -> None:
        """To be called while a checkpoint is open, when a unit has ended a round and before it ends
        the next."""
        assert self.open is not None
        cut = self.open.cuts.get(unit.plan.key_id)
        if cut is not None and cut.round == unit.round:
            self._copy(cut, unit)
            self._write_if_complete()

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most."""
        if self._folder is not None:
            marks.remove(self._folder, _mark(self._place))
        self._writer.close()

    def _begin_key(self, store: StoreAtCut, key_id: int, round_: int) -> None:
        assert self.open is not None
        key = self._keys.get(key_id)
        if key is None:
            return  # on other servers
        units: Collection[Unit] = key.units if isinstance(key, RowsKey) else key.slices(round_)
        ended = [one for one in units if one.round >= round_]
        if any(one.round > round_ for one in ended):
            raise ProtocolError(
                f"it asked for round {round_} of {key.plan.called}, which has ended a later one"
            )
        # Of one worker's names for all keys: the others' may be shifted.
        declared = replace(key.declared, name=store.names.get(key_id))
        cut = _Cut(declared, round_, store.whole, len(units))
        self.open.cuts[key_id] = cut
        self.open.missing += len(units)
        for one in ended:
            self._copy(cut, one)

    def _copy(self, cut: _Cut, unit: Unit) -> None:
        assert self.open is not None
        optimizer, state = unit.plan.optimizer, None
        if isinstance(unit, RowsKey):
            if optimizer is not None:
                state = unit.copied_state(optimizer, cut.whole)
            cut.add(0, unit.value.reshape(-1).copy(), state)
        elif isinstance(unit, ServerSlice):
            # That of a whole tensor is the same for all slices: they have ended the round together.
            if optimizer is not None and (not cut.whole or unit.offset == 0):
                index = WHOLE if cut.whole else unit.index
                state = optimizer.copied(unit.plan.declared, index)
            cut.add(unit.offset, unit.known_value().array.copy(), state)
        self.open.missing -= 1

    def _write_if_complete(self) -> None:
        assert self.open is not None and self._folder is not None
        if self.open.missing:
            return
        complete, self.open = self.open, None
        checkpoint = complete.checkpoint
        keys = [cut.complete for cut in complete.cuts.values()]
        outline = Outline(
            1, checkpoint.identity, checkpoint.step, self._place.rank,
            list(self._place.servers_hosts),
            [store.known for store in checkpoint.stores], [key.outline for key in keys],
            checkpoint.workers_host, others_hosts=checkpoint.others_hosts,
        )  # fmt: skip
        self._writes = True
        self._writer.begin(self._folder, outline, lambda: Contents(keys), checkpoint.keep_from)

    def _written(self, step: int, problem: str) -> None:
        """Tells worker rank 0 that this server's part of a step is written, or why it is not."""
        self._writes = False
        words = encode(Written(step, problem))
        self._workers.tell_rank_0(Header(Kind.WRITTEN, self._place.rank), memoryview(words))


def _mark(place: Place) -> bytes:
    return place.mark(f"server {place.rank}")


def _leave_mark(folder: str, place: Place) -> None:
    try:
        marks.leave(folder, _mark(place))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"there is no folder {folder} on host {place.host}, where this server is to write "
            "checkpoints; worker 0 has it. Set P3KV_CHECKPOINT_DIR to a folder that all hosts "
            "share under the same name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"checkpoints can't be written to {folder} on host {place.host}: {error.strerror}; set "
            "P3KV_CHECKPOINT_DIR to a folder that every server can write to"
        ) from error


def _elems(parts: Iterable[np.ndarray]) -> int:
    return sum(len(part) for part in parts)
