"""A store's keys and optimizer, as this worker has them."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import msgspec
import numpy as np

from p3kv.checkpoints import Saved, SavedTrained
from p3kv.codecs import CODECS, GRADIENTS, VALUES, check_codec, codec_features, codec_of
from p3kv.common import combinations, words
from p3kv.common.combinations import Combination, Feature
from p3kv.common.registry import Choice
from p3kv.config import Settings
from p3kv.consistency import Consistency
from p3kv.errors import ConfigError, KeyMismatchError
from p3kv.slicing import BUCKET
from p3kv.wire.fields import StateHeader
from p3kv.wire.messages import (
    MAX_STORE,
    CodecChoices,
    DeclaredKey,
    DeclareKey,
    Key,
    KeyRefused,
    Member,
    OptimizerSettings,
    ResumedStore,
    SeededRows,
    StoreAtCut,
    StoreMade,
    called,
    encode,
)
from p3kv.wire.states import LACKING, MEAN, PlainState
from p3kv.worker.data_plane import DataPlane
from p3kv.worker.global_norms import ClippedStep
from p3kv.worker.job import JobMember
from p3kv.worker.saving.cuts import LEFT, Trained, Unpushed
from p3kv.worker.transfers import WorkerKey, features_of

_log = logging.getLogger(__name__)


class WorkerStore:
    """One of the process's stores. Belongs to the thread that uses it.

    What takes long raises the job's failure once there is one.
    """

    def __init__(
        self,
        number: int,
        consistency: Optional[str],
        rule: Consistency,
        stays: bool,
        rank: int,
        speaks: bool,
        features: Set[Feature],
        settings: Settings,
        data_plane: DataPlane,
        job: JobMember,
    ) -> None:
        """`consistency` chooses `rule`, unless that is the job's. `stays`: checkpoints have it
        until the job ends. `speaks`: this worker warns for its host. `features` are the job's."""
        self._gradient_codec = codec_of(settings, GRADIENTS)
        self._value_codec = codec_of(settings, VALUES)
        self._features = features | rule.features
        self._speaks = speaks
        self._said: Set[Combination] = set()
        self.combine((), "the settings")
        self.number = number
        """In the order in which the process, and each worker, creates its stores."""
        self.describe: Callable[[], Tuple[bool, Dict[str, Any]]] = lambda: (False, {})
        """What the front end knows of the store between two steps: whether its optimizer needs
        whole tensors, and plain values. To be set by the front end."""
        self.unpushed: Callable[[], List[Unpushed]] = list
        """Has the front end copy what no gradient of the store's keys changes; to be set by it. On
        worker rank 0 only."""
        self.trained: Callable[[], List[Trained]] = list
        """Has the front end copy what this worker trains by itself."""
        self._stays = (stays or rule.workers_differ) and settings.checkpoint_dir is not None
        """Whether checkpoints have it for ever: each worker has a part of them, and objects are not
        collected on all workers at the same step."""
        self.resumed = data_plane.cuts.add(self, self._stays, data_plane.checkpoints.resumed())
        """The store in the checkpoint from which the job goes on."""
        self.steps = 0 if self.resumed is None else self.resumed.steps
        """How many steps the script has begun in this store, in this run and before it."""
        self.own_rounds = rule.own_rounds
        """Whether rounds are each worker's own: the store is asynchronous."""
        if self.own_rounds:
            data_plane.cuts.of_all_workers = True
        self.consistency = consistency
        """What chooses the rule of its keys, as settings spell it; None: they have the job's."""
        self.rule = rule
        """By which its keys' rounds end."""
        self._rank = rank
        self._cuts_before = 0
        """How many checkpoints there were before the store's newest step."""
        self.is_saved = settings.checkpoint_dir is not None
        """Whether the job writes checkpoints."""
        self.may_be_cut = False
        """Whether there may be a checkpoint of what is pushed in the store's newest step. Its
        values travel as they are, since a job that goes on begins with them."""
        self._told_memory = False
        self._has_optimizer = False
        self._momentum: Optional[float] = None
        """That of the optimizer, where the codec of gradients applies it."""
        self._data_plane = data_plane
        self._job = job
        self._call_soon = job.loop.call_soon
        self._keys: Dict[Key, WorkerKey] = {}
        self.count_push = data_plane.steps.of_store(number).count_push
        """Counts a push of the store's newest step, before its transfer begins."""

    def declare(
        self,
        key: Key,
        shape: Sequence[int],
        dtype: str,
        name: Optional[str] = None,
        layout: str = "dense",
        whole: bool = False,
        beside: bool = False,
        same_name: bool = False,
        initial: Optional[SeededRows] = None,
        members: Sequence[Member] = (),
        keeps_means: bool = False,
    ) -> WorkerKey:
        """Makes a key known to the job; all workers declare it with the same shape, dtype and
        layout.

        `name` is what the user calls the parameter, for messages. `whole`: one server must keep all
        of it, because the optimizer needs whole tensors. `beside`: it is none of the store's own
        keys: its value is a sum, no codec encodes it, and servers' checkpoints do not have it.
        `same_name`: all workers must call it the same, which `has_optimizer` checks. `initial`: how
        servers make its initial rows, which nobody pushes then. `members`: the tensors of a bucket,
        if it is one. `keeps_means`: servers keep the mean gradient of its last round, if the job's
        rule and codecs have one, and the optimizer's state before it.

        Raises KeyMismatchError if they do not, and the other workers learn it too; ConfigError for
        a layout that is not known here, and what `combine` raises.
        """
        self._job.check()
        codecs, store = CodecChoices(), MAX_STORE - self.number  # which has no optimizer
        if not beside:
            codecs, store = CodecChoices(self._gradient_codec, self._value_codec), self.number
        declaration = DeclareKey(
            key, tuple(shape), dtype, name, BUCKET if members else layout, codecs, store, whole,
            self.consistency,
            same_name, initial, list(members),
        )  # fmt: skip
        # Before any process hears of it.
        features = features_of(declaration, self.rule)
        if keeps_means and self.rule.waits_for_each_round:
            keeps_means = not features & {Feature.REMEMBERING, Feature.ROWS}
            declaration = msgspec.structs.replace(declaration, keeps_means=keeps_means)
        what = f"{called(key, name)} of {dtype}"
        if Feature.ROWS in features:
            what += ", with a sparse weight or gradient"
        if Feature.CODEC in features:
            what += (
                f", with the codec {codecs.gradients} for gradients and {codecs.values} for values"
            )
        self.combine(features, what)
        answer = self._job.control.request(declaration, (DeclaredKey, KeyRefused))
        if isinstance(answer, KeyRefused):
            raise KeyMismatchError(answer.reason)
        worker_key = WorkerKey(answer, self.rule, name, self._features)
        if beside:
            worker_key.store = self.number  # whose steps count its pushes
            self._call_soon(self._data_plane.declare, worker_key)
            return worker_key
        if self.is_saved:
            self._data_plane.checkpoints.remember(worker_key, self.resumed is not None)
            self._data_plane.cuts.of_all_workers |= self._data_plane.checkpoints.own.has_part
        self._tell_momentum(worker_key)
        self._keys[key] = worker_key
        self._call_soon(self._data_plane.declare, worker_key)
        return worker_key

    def leave(self) -> None:
        """Another store has the parameters from now on, and checkpoints only this one's number of
        steps. All workers call it between the same steps, when nothing is under way."""
        if self._stays:
            return
        self._data_plane.cuts.leave(self.number, self.steps)
        self._call_soon(self._data_plane.forget, self.number)

    @property
    def was_left(self) -> bool:
        """Whether the job goes on from a checkpoint in which another store had the parameters."""
        return self.resumed is not None and self.resumed.numbers == LEFT

    def has_optimizer(
        self, parameters: int, uses: Dict[str, str], same_names: bool = False
    ) -> None:
        """Have the scheduler compare the store's optimizer with the other workers': its number of
        parameters, what it `uses`, and with `same_names` the names of all, which are declared.
        Where workers differ, the job ends."""
        self._job.control.send(StoreMade(self.number, parameters, uses, same_names))

    def combine(self, features: Collection[Feature], what: str) -> None:
        """Raises NotSupportedError, or StatesError, where some of these features, and of the
        store's own, can't be combined. Where one has no effect, the log says so once for a store.

        `what` says which key has them, or what the script has done.
        """
        combined = {*self._features, *features}
        if self.codec_applies_momentum:
            combined.add(Feature.MOMENTUM)
        combinations.check(combined, what)
        for entry in combinations.left_out(combined):
            if self._speaks and entry not in self._said:
                self._said.add(entry)
                _log.warning("%s: %s: %s", what, entry.in_words, entry.sentences)

    def choose_gradient_codec(self, choice: Choice) -> None:
        """Has the gradients of a store's keys travel by this codec, instead of by the settings'.

        All workers choose the same, before they declare the store's first key. Raises ConfigError
        for a codec that is not registered here, not for gradients or has wrong parameters, and
        where it comes too late.
        """
        self._job.check()
        check_codec(choice, GRADIENTS)
        if self._keys:
            raise ConfigError(
                f"the store has keys already, whose gradients do not travel by the codec {choice}; "
                "choose it before the first key is initialised"
            )
        if self._has_optimizer and CODECS.find(choice.name).applies_momentum:
            raise ConfigError(
                f"the codec {choice} applies the optimizer's momentum, and the servers have been "
                "told to apply it; choose the codec before the optimizer is set"
            )
        self._gradient_codec = choice

    @property
    def travels_as_it_is(self) -> bool:
        """Whether gradients and values travel as they are in memory."""
        return CodecChoices(self._gradient_codec, self._value_codec) == CodecChoices()

    def combine_with_codecs(self, features: Collection[Feature], what: str) -> None:
        """As `combine`, with the features of the store's codecs."""
        codecs = codec_features(self._gradient_codec, self._value_codec, np.dtype(np.float32))
        self.combine({*features, *codecs}, what)

    @property
    def codec_applies_momentum(self) -> bool:
        """Whether the optimizer's momentum is applied on workers, by the codec of gradients."""
        return CODECS.find(self._gradient_codec.name).applies_momentum

    def optimizer_set(self, momentum: Optional[float]) -> None:
        """The store has an optimizer, from the next push on; `momentum` as `ScriptOptimizer` has
        it."""
        self._has_optimizer = True
        if self.codec_applies_momentum:
            self._momentum = momentum
            for key in self.declared():
                self._tell_momentum(key)

    def _tell_momentum(self, key: WorkerKey) -> None:
        if self._momentum is not None:
            key.encoder.use_momentum(self._momentum)

    def key(self, key: Key) -> WorkerKey:
        """The declared key; KeyMismatchError if there is none."""
        try:
            return self._keys[key]
        except KeyError:
            known = ", ".join([repr(known) for known in self._keys][:10]) or "none"
            raise KeyMismatchError(
                f"key {key!r} is unknown on worker {self._rank}; initialise it with "
                f"{words.current().declare_key} first. Known keys: {known}"
            ) from None

    def declared(self) -> List[WorkerKey]:
        """The store's keys, in the order in which they were declared."""
        return list(self._keys.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def keys_on_several_servers(self) -> List[WorkerKey]:
        """A store's declared keys of which no server has the whole tensor."""
        return [key for key in self.declared() if len(key.runs) > 1]

    def publish_order(self, keys: Sequence[Key]) -> None:
        """Worker rank 0 announces the forward order, the first layer's key first. Servers pass it
        on before results of later slices, so workers send rounds that need results in one order."""
        key_ids = [self._keys[key].key_id for key in keys]
        self._call_soon(self._data_plane.publish_order, key_ids, self.number)

    def set_optimizer(
        self, from_step: int, front_end: str, settings: bytes, in_step: bool = True
    ) -> None:
        """Worker rank 0 sends the front end's optimizer settings, before every slice of the step
        from which they hold; `in_step`: it has begun."""
        self._job.check()
        message = encode(OptimizerSettings(front_end, settings, in_step))
        self._call_soon(self._data_plane.steps.send_settings, from_step, message, self.number)

    def optimizer_state(
        self, key: WorkerKey, whole: bool, member: int = 0, before: bool = False
    ) -> List[Optional[PlainState]]:
        """States that the servers' optimizer has of a key, in the order of the key's runs; `whole`
        where it needs whole tensors. `member`: that of a bucket's tensor with this number, from 1.
        `before`: as they were before this worker's last round, of a key that keeps means.

        Waits until all rounds have ended that this worker has pushed. All its pushes must have been
        sent. The other workers need not call anything.
        """
        return self._states(key, whole, member, StateHeader.BEFORE if before else 0)

    def mean_gradient(self, key: WorkerKey) -> Tuple[Optional[np.ndarray], int]:
        """The mean of all workers' gradients of this worker's last round of a key that keeps means,
        flat, and which tensors of a bucket no worker had a gradient of, a bit for each; None where
        none had any.

        Waits until all workers' gradients are there, also those of a step that is held. From any
        thread; the other workers need not call anything.
        """
        parts = [one for one in self._states(key, asks=StateHeader.MEAN) if one is not None]
        if not parts:  # it has no elements
            return np.empty(0, np.float32), 0
        found = [one.elements[MEAN] for one in parts if MEAN in one.elements]
        return np.concatenate(found) if found else None, parts[0].numbers[LACKING]

    def _states(
        self, key: WorkerKey, whole: bool = False, member: int = 0, asks: int = 0
    ) -> List[Optional[PlainState]]:
        requests = self._data_plane.states
        with requests.asking:
            answer = self._job.ask(requests.ask, key, key.round, whole, member, asks)
            states = answer.result()
        return [states[server] for server, _ in key.runs]

    def load_optimizer_state(
        self, key: WorkerKey, states: Iterator[Optional[PlainState]], whole: bool, member: int = 0
    ) -> None:
        """Worker rank 0 gives the servers' optimizer what it is to remember of a key from the end
        of this worker's last round on, in the order of the key's runs. Waits until each has its
        part before it takes the next. `whole` and `member` as in `optimizer_state`.

        All pushes must have been sent, and other workers must not push meanwhile.
        """
        requests = self._data_plane.states
        for server, _ in key.runs:
            with requests.asking:
                part = {server: next(states)}
                self._job.ask(requests.give, key, key.round, whole, part, member).result()
                del part  # before the next is read

    def begin_clipped_step(self, step: int) -> None:
        """Has the servers end no round of a step before `end_clipped_step`; before its pushes."""
        self._call_soon(self._data_plane.global_norms.begin, step)

    def end_clipped_step(self, clipped: ClippedStep) -> None:
        """Says that all keys of a step are pushed. Its sums are scaled so that the norm of all is
        at most the step's `max_norm`, or dropped, and then its rounds end."""
        self._job.check()
        self._call_soon(self._data_plane.global_norms.end_pushes, clipped)

    def norm(self, number: int) -> Future[float]:
        """The norm of a clipped step's sums, once known; ask before the next one begins."""
        return self._job.ask(self._data_plane.global_norms.ask, self.number, number)

    def vote(self, number: int, drops: bool, factor: float) -> None:
        """Vote on dropping a clipped step, whose rounds end when all have voted; `factor`: the
        step's, for this worker."""
        self._job.check()
        self._call_soon(self._data_plane.global_norms.vote, self.number, number, drops, factor)

    def is_dropped(self, number: int) -> Future[bool]:
        """Whether a clipped step is dropped, once known; ask before the next one begins."""
        return self._job.ask(self._data_plane.global_norms.ask, self.number, number, True)

    def step_begins(self) -> None:
        """A step of the script begins: there may be a checkpoint of all that was pushed before."""
        if not self.is_saved:
            self.steps += 1
            return
        due = self._data_plane.cuts.due(self.number, self.steps)
        if due is not None and (self._rank == 0 or self._data_plane.cuts.of_all_workers):
            cut = self._data_plane.cuts.cut(self._data_plane.steps.newest, due)
            self._call_soon(self._data_plane.checkpoints.add, cut)
        self.steps += 1
        self.may_be_cut = self._data_plane.cuts.may_be_due(self.rule.steps_between_pushes)

    @property
    def may_end_in_cut(self) -> bool:
        """Whether there is a checkpoint of the store's newest step if the script ends now."""
        return self.is_saved and self._data_plane.cuts.may_be_due()

    @property
    def waits_for_cut(self) -> bool:
        """Whether a step is not to begin before the script ends its backward pass: stores then
        begin their steps in the script's order, and a checkpoint may come before the first."""
        return self.is_saved and self._data_plane.cuts.waits(self.number)

    def begin_local_step(self) -> None:
        """To be called in each step of a worker that trains by itself, when it updates its
        weights."""
        self._call_soon(self._data_plane.times.begin_local_step, time.monotonic())

    def step_ends(self) -> None:
        """To be called when all is pushed of a step, where the front end knows."""
        if self.is_saved and self._rank == 0:
            self._data_plane.cuts.step_ended()

    @property
    def was_cut(self) -> bool:
        """Whether a checkpoint has ended the store's newest step: later pushes belong to none."""
        return self._data_plane.cuts.count != self._cuts_before

    def at_cut(self) -> StoreAtCut:
        """What checkpoints have of the store, between two steps."""
        whole, numbers = self.describe()
        rounds = [(key.key_id, key.round) for key in self.declared()]
        names = {key.key_id: key.name for key in self.declared() if key.name is not None}
        known = ResumedStore(self.number, self.steps, numbers)
        return StoreAtCut(known, whole, rounds, names, self.own_rounds)

    def keep_trained(self, copies: Callable[[], List[Trained]]) -> None:
        """Save what this worker trains by itself, which `copies()` copies at each checkpoint;
        ConfigError where it can't write to the folder."""
        if self.is_saved:
            self._data_plane.checkpoints.own.have_part()
            self._data_plane.cuts.of_all_workers = True
            self.trained = copies

    @property
    def own_numbers(self) -> Dict[str, Any]:
        """What this worker told of the store at the checkpoint, if it has a part."""
        if self.resumed is None:
            return {}
        checkpoints = self._data_plane.checkpoints
        return checkpoints.resumed_part.numbers(self.number, checkpoints.resumed()).copy()

    def own_trained(self, key: Key) -> Optional[SavedTrained]:
        """What this worker had at the checkpoint of a key that it trains by itself, or None;
        CheckpointError where it can't be read."""
        if self.resumed is None:
            return None
        checkpoints = self._data_plane.checkpoints
        return checkpoints.resumed_part.trained(self.number, key, checkpoints.resumed())

    @property
    def saved(self) -> Optional[Saved]:
        """The checkpoint from which the job goes on; on worker rank 0 only."""
        return self._data_plane.checkpoints.saved

    def new_step(self) -> int:
        """Returns the number of a step that begins in one of the stores."""
        self._tell_memory_once()
        self._cuts_before = self._data_plane.cuts.count
        return self._data_plane.steps.new_step(self.number)

    def _tell_memory_once(self) -> None:
        if self._told_memory:
            return
        self._told_memory = True
        keys = [key for key in self.declared() if key.codecs.values.of_each_worker]
        if keys and self._rank == 0:
            workers = self.rule.num_workers
            copies_mb = sum(key.size_bytes for key in keys) * workers / 1e6
            _log.warning(
                "by the codec %s workers have other values than the servers until %s is "
                "called: call it before values are saved, or used for anything but training. "
                "Servers keep what each of %d workers has, %.1f MB in all",
                self._value_codec, words.current().synchronise, workers, copies_mb,
            )  # fmt: skip

    @property
    def forward_order(self) -> List[Key]:
        """The keys in the order in which the forward pass needs them, as far as known."""
        return self._data_plane.forward_order(self.number)
