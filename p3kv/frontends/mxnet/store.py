"""The store that MXNet's users see."""

from __future__ import annotations

import operator
from contextlib import contextmanager, suppress
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)
from weakref import finalize

import mxnet as mx
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from p3kv import errors
from p3kv.common.combinations import Feature
from p3kv.frontends.mxnet import (
    engine,
    environment,
    refusals,
    rows,
    script_marks,
)
from p3kv.frontends.mxnet.arrays import (
    DENSE,
    ROW_SPARSE,
    by_key,
    check_distinct,
    check_fit,
    check_key,
    check_kind,
    check_sources,
    check_targets,
    dense,
    dtype_name,
    listed,
    spread,
)
from p3kv.frontends.mxnet.checkpoints import Local, OptimizerGoesOn, copied, initial
from p3kv.frontends.mxnet.engine import complete_before_forks
from p3kv.frontends.mxnet.environment import ASYNC_TYPE, SYNC_TYPE
from p3kv.frontends.mxnet.forward_order import FORWARD_READS
from p3kv.frontends.mxnet.local import LocalSteps
from p3kv.frontends.mxnet.operations import Operations
from p3kv.frontends.mxnet.optimizers.server_states import ServerStates
from p3kv.frontends.mxnet.refusals import KeyMismatchError
from p3kv.frontends.mxnet.steps import ServerSteps, Steps
from p3kv.store.client import Client
from p3kv.store.clipped_steps import checked
from p3kv.store.compression import choice
from p3kv.wire.messages import Key, called
from p3kv.worker import this_process
from p3kv.worker.transfers import WorkerKey


class P3(KVStoreBase):
    """MXNet's distributed KVStore with priority-based parameter propagation (P3, SysML'19).

    Every call returns at once: it pushes an operation into MXNet's engine. The engine starts the
    operation when the gradient is ready, and holds back what needs the weight until the new value
    has arrived. A call raises what it can't do. If the job fails later, MXNet raises the reason as
    `mxnet.base.MXNetError` to callers that wait for a weight, and every further call raises it.

    Values are arrays of float16, float32, float64, int8, uint8, int32 or int64. Sums are of the
    key's dtype, and integers wrap around. Servers sum float16 in float32 and round a sum once; an
    optimizer with `multi_precision` gets it in float32. Where several arrays are given, one for
    each device, they are summed before they are sent. A value is cast where an array of `out` has
    another dtype. If a weight or its gradient is row_sparse when its key is initialised, only
    touched rows travel.
    To be used from one thread. A process may have several stores: each has keys and an optimizer of
    its own. All workers create their stores in the same order.

    Creating it lowers Python's switch interval to 0.1 ms until the process ends, so that a script
    that is busy in Python does not delay gradients. The setting `switch_interval_s` chooses another
    interval, and 0 keeps Python's.
    """

    def __init__(self, consistency: Optional[str] = None) -> None:
        """`consistency` chooses the rule by which rounds end, as P3KV_CONSISTENCY does, unless it
        is the job's."""
        is_first = this_process.joined() and not this_process.worker().started
        # A front end has the name of its framework.
        client = Client(
            mx.__name__, OptimizerGoesOn, consistency, stays=True, reads=FORWARD_READS,
            refuse_part=refusals.refuse_part_of_a_step,
        )  # fmt: skip
        self._worker, self._own = client.worker, client.own
        """The worker of all stores, and this store's keys and optimizer."""
        if is_first:
            complete_before_forks()
            engine.hold_back_interrupts()
            this_process.at_end(_finish)
            script_marks.trace(self._worker.tracer)
            worker = self._worker
            script_marks.note(
                worker.forward_begins, worker.waits, worker.waits_for_all, worker.waited
            )
        if not self._own.is_saved:
            finalize(self, self._worker.forget_store, self._own.number, list).atexit = False
        self.compression_params: Optional[Mapping[str, Any]] = None
        """Parameters given to `set_gradient_compression`."""
        self._names: Mapping[Key, str] = {}
        self._expected_rows: Set[Key] = set()
        self._order, self._pushes, self._resuming = client.order, client.pushes, client.resuming
        self._operations = Operations(client)
        states = ServerStates(self._own, self._pushes, self.rank, self._worker.barrier)
        self._steps: Steps = ServerSteps(
            self._own, self._operations, self._pushes, self._resuming, states
        )
        """What becomes of gradients."""

    # What MXNet asks about the store.

    @property
    def type(self) -> str:
        """'dist_sync_p3', also if created as 'p3': MXNet looks for 'dist' and '_sync'. Or else
        'dist_async_p3'."""
        return ASYNC_TYPE if self._own.own_rounds else SYNC_TYPE

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0."""
        return self._worker.rank

    @property
    def num_workers(self) -> int:
        """Number of workers in the job."""
        return self._worker.num_workers

    @property
    def local_rank(self) -> int:
        """Number of this worker among those of its host, from 0: `mx.gpu(kv.local_rank)`."""
        return self._worker.on_this_host.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return len(self._worker.on_this_host)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store has a capability: 'optimizer', to update weights on the servers."""
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return True
        raise ValueError(f"'{capability}' is unknown as a capability; p3kv knows 'optimizer'")

    @property
    def forward_order(self) -> List[Key]:
        """Keys in the order in which the forward pass needs them, the most urgent first.

        Empty until it is learned; the same on all workers.
        """
        return self._own.forward_order

    @property
    def resumed_steps(self) -> int:
        """How many steps the script had made with this store at the checkpoint from which the job
        goes on: it skips their batches. 0 where the job goes on from none."""
        return 0 if self._own.resumed is None else self._own.resumed.steps

    def stats(self) -> Dict[str, Any]:
        """Measurements of this worker so far; docs/measuring.md says what each number means."""
        return self._worker.stats()

    # Values.

    @property
    def consistency(self) -> Optional[str]:
        """What chooses the store's rule; None: it has the job's."""
        return self._own.consistency

    @property
    def is_taken(self) -> bool:
        """Whether anybody has used the store: it has an optimizer, a key or a key's name."""
        return bool(self._updater or self._names or self._own.declared())

    def keep_unpushed(self, source: Callable[[], List[Local]]) -> None:
        """Has checkpoints keep what no gradient changes, which `source()` gives at each of them;
        after its keys are declared. Where the job goes on from a checkpoint, values that have no
        keys are the checkpoint's afterwards, on all workers.
        """
        if not self._own.is_saved:
            return
        now = source()
        resumed = self._resuming.keep_unpushed(
            {local.key: local.name for local in now},
            lambda: [copied(one) for one in source() if not self._steps.trains(one.key)],
        )
        for local in now:
            if local.key in resumed:
                self.broadcast(local.key, local.arrays[0], local.arrays)

    def name_keys(self, names: Mapping[Key, str]) -> None:
        """Sets the user's names of parameters whose keys are still to be declared."""
        self._names = {**self._names, **names}

    def has_optimizer(self, parameters: int, name: str) -> None:
        """Says which optimizer a Trainer uses, and for how many parameters: all workers must make
        theirs alike."""
        self._own.has_optimizer(parameters, {"the optimizer": name})

    def expect_rows(self, keys: Iterable[Key]) -> None:
        """Says which keys that are still to be declared get row_sparse gradients."""
        self._expected_rows.update(keys)

    def init(self, key: Union[Key, Sequence[Key]], value: Any) -> None:
        """Declares keys on all workers; worker rank 0's values are the initial ones."""
        check_distinct(key)
        for one_key, (first, *_) in by_key(key, value):
            worker_key = self._declare(one_key, first)
            self._order.note_key(one_key, [first])
            if self.rank == 0:
                self._give_initial(worker_key, first)
        self._resuming.wait_for_states(self._worker.barrier)

    def broadcast(
        self, key: Union[Key, Sequence[Key]], value: Any, out: Any, priority: int = 0
    ) -> None:
        """Declares keys and gives worker rank 0's `value` to `out` on all workers."""
        priority = _priority(priority)
        check_distinct(key)
        for one_key, (first, *_), targets in by_key(key, value, out):
            worker_key = self._declare(one_key, first, targets)
            self._order.note_key(one_key, targets)
            if self.rank == 0:
                spread(self._give_initial(worker_key, first, targets), targets)
            else:
                self._operations.pull(worker_key, targets, priority)
            self._steps.given(worker_key, targets)
        self._resuming.wait_for_states(self._worker.barrier)

    def pushpull(
        self, key: Union[Key, Sequence[Key]], value: Any, out: Any = None, priority: int = 0
    ) -> None:
        """Pushes gradients and receives the round's result into `out` (by default `value`):
        the updated weight if the store has an optimizer, or else the sum over the workers.

        `priority`, a whole number of 32 bits, holds until the forward order is learned; larger
        goes first.
        """
        priority = _priority(priority)
        self._steps.check_out(out)
        self._steps.pushpull(self._known(key, [value], [value if out is None else out]), priority)

    def push(self, key: Union[Key, Sequence[Key]], value: Any, priority: int = 0) -> None:
        """Pushes gradients; the result stays on the servers until `pull`."""
        priority = _priority(priority)
        self._steps.check_out(None)
        self._steps.push(self._known(key, [value]), priority)

    def push_no_gradient(self, key: Key, out: Any = None, priority: int = 0) -> Callable[[], bool]:
        """Says that this worker has no gradient of a key in this round, for gluon's Trainer.

        The result comes into `out`, if given: the sum of the workers that have one, or the weight,
        updated by it. If none has, the round changes nothing, and a sum does not come.

        Returns a function that waits for the round's end and says whether another worker had a
        gradient; without an optimizer it must be called.
        """
        priority = _priority(priority)
        self._steps.check_out(out)
        [(worker_key, *targets)] = self._known(key, outs=[] if out is None else [out])
        return self._steps.push_no_gradient(worker_key, targets, priority)

    def pull(
        self,
        key: Union[Key, Sequence[Key]],
        out: Any = None,
        priority: int = 0,
        ignore_sparse: bool = True,
    ) -> None:
        """Receives values into `out`, this worker's last push included.

        With `ignore_sparse`, sparse arrays of `out` stay as they are; without, they are refused.
        """
        if out is None:
            raise TypeError("pull needs out=, the arrays to write into")
        priority = _priority(priority)
        for worker_key, targets in self._known(key, [], [out], ignore_sparse):
            self._steps.pull(worker_key, targets, priority, ignore_sparse)

    def synchronize(self) -> None:
        """Gives all dense arrays that have received values the servers' own, unrounded, after this
        worker's last push: where P3KV_VALUE_CODEC has each worker lack some changes, or rounds.
        Training may go on afterwards. Arrays that have only had initial values, such as BatchNorm's
        running averages, stay as they are. A worker that trains by itself loses what it has learned
        since its last exchange."""
        self._worker.check()
        self._steps.synchronize()

    def exchange(self) -> None:
        """Has all workers' weights, and the servers', be the mean of all workers' weights, where
        workers train by themselves (`local`): at the end of a training, before it is evaluated or
        saved. With `bounded` and `lazy=1` they have all that workers have trained. By other rules
        all workers have the same weights anyway, and it is `synchronize`. All workers call it,
        after the same step."""
        self._worker.check()
        self._steps.exchange(self._worker.barrier)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Receives the rows with the numbers `row_ids`, in any order, into row_sparse arrays.

        This worker's last push is included. Returns at once when `row_ids` are ready, so a script
        may call it early for the rows of its next batch.
        """
        if out is None or row_ids is None:
            raise TypeError("row_sparse_pull needs out= and row_ids=")
        priority = _priority(priority)
        for one_key, outs, ids in rows.ids_by_out(key, out, row_ids):
            [(worker_key,)] = self._known(one_key)
            self._operations.pull_rows(worker_key, outs, priority, ids)

    # The optimizer.

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Has the servers update weights with worker rank 0's optimizer from now on.

        It begins with fresh states, also if another one was set before, and counts on from what
        it has counted, as where MXNet updates: this optimizer goes on counting, with other stores,
        too. Later changes to it, such as `trainer.set_learning_rate`, hold from the next step on.
        Raises NotSupportedError for an optimizer that the servers can't build, or that needs whole
        tensors while a key is on several servers already.
        """
        if self._own.rule.local is not None and self._steps.updater is None:
            self._steps = LocalSteps(
                self._own, self._operations, self._pushes, self._resuming, self.rank, optimizer
            )
        else:
            self._steps.set_optimizer(optimizer)
        self._resuming.wait_for_states(self._worker.barrier)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Has gradients travel by a codec: {'type': '2bit', 'threshold': 0.5}.

        'type' is the codec's name; the rest are its parameters. Initial values and the values that
        come back travel as without it. To be called with the same on all workers before the
        store's first key is initialised, or else ConfigError is raised; also for wrong parameters.
        """
        chosen = choice(compression_params)
        self._own.choose_gradient_codec(chosen)
        self.compression_params = compression_params

    def clip_global_norm(self, max_norm: Optional[float]) -> None:
        """Has the servers scale the gradients of each step, from the next one on, so that the norm
        of all together is at most `max_norm`; None ends this.

        The numbers are those of `gluon.utils.clip_global_norm` on the gradients summed over the
        workers, before `rescale_grad`: so `max_norm` is for the sum over the whole batch. A step is
        what gluon's Trainer or Module pushes, or what one call of `push` or `pushpull` does. No
        value comes back before all gradients of the step are summed. All workers call it; worker
        rank 0's number counts, and may change at any step.

        Raises ConfigError for a number that is not above 0, NotSupportedError where steps can't be
        clipped.
        """
        number = None if max_norm is None else checked(max_norm)
        if number is not None:
            at_once = {Feature.AT_ONCE} if environment.runs_operations_at_once() else set()
            self._own.combine({Feature.CLIPPING, *at_once}, f"kv.clip_global_norm({max_norm})")
        self._pushes.clipping.clip(number, self._worker.barrier)

    @property
    def max_norm(self) -> Optional[float]:
        """Norm given to `clip_global_norm`."""
        return self._pushes.clipping.max_norm

    def global_norm(self) -> Optional[float]:
        """The norm of all summed gradients of the last step, before they were scaled; None if no
        step has been clipped. Waits until all workers have pushed."""
        norm = self._pushes.clipping.norm()
        return None if norm is None else norm.result()

    @contextmanager
    def one_step(self, fresh: Optional[Collection[Key]] = None) -> Iterator[None]:
        """Groups the pushes inside into one step: for `clip_global_norm`, and for settings that
        have changed. Nothing that waits for a new value may be inside. `fresh`: the keys of which
        this worker has a gradient, unless that is all."""
        with self._steps.one_step(fresh):
            yield
        self._own.step_ends()

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Writes what the servers' optimizer remembers, as MXNet's Updater writes it.

        The file is that of all rounds that this worker has pushed; it waits for their end. One
        worker may call it, or each with a file of its own. Counts of updates are saved only with
        `dump_optimizer`, as gluon's Trainer does. A file of this name is replaced when all is
        written; raises OSError if that is not possible, and StatesError without an optimizer.
        """
        self._worker.check()
        self._steps.save(fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Goes on from a file that a p3 store, or MXNet's Updater, has written.

        All workers call it, and each reads the file. Worker rank 0's states count. Counts, learning
        rate and its schedule are the file's if it has the optimizer, or else stay as they are.
        Raises StatesError for a file that does not fit, before anything changes.
        """
        self._worker.check()
        self._steps.load(fname)

    @property
    def _updater(self) -> Any:
        """The optimizer, where MXNet's Trainer looks for it."""
        return self._steps.updater

    # What MXNet's store has and this one does not.

    @property
    def handle(self) -> NoReturn:
        """Absent, and `hasattr` says so: there is no native store, which MXNet's profiler needs."""
        refusals.refuse_handle()

    def _set_updater(self, updater: Any) -> None:
        """Refused: MXNet's own distributed stores take it and never call it."""
        refusals.refuse_updater()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Does what MXNet's command asks for where the servers do it anyway, and refuses others."""
        refusals.check_command(head, body, self._own.own_rounds)

    def _barrier(self) -> None:
        """Waits for all workers, as MXNet's stores do."""
        self._worker.barrier()

    # How it is done.

    def _declare(self, key: Key, value: NDArray, outs: Sequence[NDArray] = ()) -> WorkerKey:
        check_key(key)
        name = self._names.get(key)
        in_messages = called(key, name)
        if key in self._own:
            raise KeyMismatchError(
                f"{in_messages} was initialised before on worker {self.rank}; initialise each key "
                "once, or use another store: each mx.kv.create('p3') has keys of its own"
            )
        check_kind(in_messages, value, (DENSE, ROW_SPARSE))
        shape, dtype = tuple(value.shape), dtype_name(value)
        # Before the key is declared to others: a refused call changes nothing.
        check_fit(in_messages, shape, None, outs)
        optimizer = self._pushes.optimizer
        whole = optimizer is not None and optimizer.needs_whole_tensors
        layout = rows.layout(value, outs, key in self._expected_rows)
        return self._own.declare(key, shape, dtype, name, layout, whole)

    def _give_initial(
        self, key: WorkerKey, value: NDArray, targets: Sequence[NDArray] = ()
    ) -> NDArray:
        """Gives the servers `value`, or the checkpoint's value in its place; returns which."""
        saved = self._resuming.initial(key)
        if saved is not None:
            value = initial(value, saved)
        self._operations.push_initial(key, value, targets)
        self._resuming.give_state(key)
        return value

    def _known(
        self,
        keys: Any,
        values: Sequence[Any] = (),
        outs: Sequence[Any] = (),
        ignore_sparse: bool = False,
    ) -> List[Tuple[Any, ...]]:
        """Declared keys with lists of their arrays; raises the job's failure.

        The arrays of several keys are all checked here: a call that is refused pushes nothing.
        """
        self._worker.check()
        try:
            if not isinstance(keys, (list, tuple)):
                return [(self._own.key(keys), *map(listed, values), *map(listed, outs))]
            known = [(self._own.key(key), *lists) for key, *lists in by_key(keys, *values, *outs)]
        except errors.KeyMismatchError as error:
            raise KeyMismatchError(str(error)) from None
        checks = [check_sources] * len(values) + [check_targets] * len(outs)
        for worker_key, *lists in known:
            for check, one in zip(checks, lists):
                check(worker_key, dense(one) if ignore_sparse else one)
        return known


def _priority(priority: int) -> int:
    if not -(2**31) <= operator.index(priority) < 2**31:
        raise ValueError(f"priority is {priority}; it must be a whole number of 32 bits")
    return int(priority)


def _finish() -> None:
    """Before MXNet's engine ends: completes the operations under way, with an error if need be.

    The worker's thread goes on until all are complete. Otherwise an operation that the engine
    starts later would never be completed, and the process would never end.
    """
    this_process.give_up_if_script_failed()
    with suppress(mx.base.MXNetError):  # a caller that waited for one of these arrays has seen it
        mx.nd.waitall()
    this_process.leave()
