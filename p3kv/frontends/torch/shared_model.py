"""A model's parameters, those that its optimizer has and others, and its buffers, which all workers
share."""

from __future__ import annotations

from contextlib import suppress
from typing import List, Mapping, Optional, Sequence, Set, Tuple, Type
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np
import torch

from p3kv.common.words import some_of
from p3kv.errors import NotSupportedError, P3Error
from p3kv.frontends.torch.averaged import averaged
from p3kv.frontends.torch.buffer_places import (
    AVERAGE,
    BROADCAST,
    IN_FORWARD,
    OWN,
    OWNS,
    Memory,
    own_or_shared,
    places_of,
    untrained_places,
)
from p3kv.frontends.torch.buffers import Alias, Buffers, Untrained, kept, push_owed
from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.joining import Attendance
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.refusals import (
    check_all_stay,
    check_parameter,
    check_rule,
    warn_of_replaced,
)
from p3kv.frontends.torch.rows import LAYOUT, RowsBucket, RowSums, counted
from p3kv.frontends.torch.steps import Steps, parameters_of
from p3kv.frontends.torch.table import Table
from p3kv.frontends.torch.tensors import DTYPES, tensor_in
from p3kv.frontends.torch.values.asleep import settle_all
from p3kv.frontends.torch.values.bucket import Bucket, Joinable, buckets_of
from p3kv.frontends.torch.values.compiled import own_name
from p3kv.frontends.torch.values.devices import Devices
from p3kv.frontends.torch.values.early import EARLY, forget_with
from p3kv.frontends.torch.values.table_weight import TableWeight
from p3kv.frontends.torch.values.written import is_written
from p3kv.store.client import Client
from p3kv.wire.messages import Member
from p3kv.worker import this_process
from p3kv.worker.saving.cuts import Unpushed


class SharedModel:
    """Declares parameters, gives all workers the same first values, and stops what has trained them
    before. Belongs to the script's thread."""

    def __init__(
        self,
        client: Client[TorchScriptOptimizer],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str],
        whole: bool,
        sparse: Mapping[int, str],
        by_servers: bool = True,
        keeps_means: bool = False,
    ) -> None:
        """Declares the parameters of `optimizer`, and where workers update them, others whose
        gradients are to be means (`averaged`). `buffers`: whose they are after each step, or
        None for the rule's default. `whole`: servers update whole tensors, and not slices.
        `sparse`: by id, the names of parameters that travel by rows. `by_servers`: these update the
        parameters, or by `local` exchange them; else they average gradients. `keeps_means` as in
        `WorkerStore.declare`.

        Raises NotSupportedError for what can't travel.
        """
        worker, own = self.worker, self._own = client.worker, client.own
        check_rule(own.rule, own.consistency or worker.settings.consistency)
        self._how = own_or_shared(buffers, own.rule)
        self._chosen = buffers is not None
        if self._how == AVERAGE:
            check_all_stay(worker.settings, "the mean of buffers")
        self._by_servers, self._keeps_means = by_servers, keeps_means
        self._uses = {
            "the optimizer": class_of(optimizer).__name__,
            "buffers=": self._how,
            "updates=": "servers" if by_servers else "workers",
        }
        self.pushes, self.resuming = client.pushes, client.resuming
        self._devices = Devices(worker.abort)
        self.buckets = self._declared(model, optimizer, whole, sparse)
        self.of_parameter = {
            id(weight.parameter): (bucket, weight)
            for bucket in self.buckets
            for weight in bucket.weights
        }
        """By the parameter's id."""
        self.every = [weight for _, weight in self.of_parameter.values()]
        """All parameters, in their order."""
        self.exchange = Exchange(worker, own, self.pushes, self.buckets, self._devices)
        for bucket in self.buckets:
            if isinstance(bucket, Table):
                bucket.connect(worker.begin, lambda: self.pushes.step, worker.rank == 0)
        places = places_of(model, self._how, self._devices)
        self._first_places, self._other_buffer = {*places}, ""
        memory, every = Memory(self.weights), [*self.of_parameter.values()]
        self._places = [place for place in places if not memory.of(place.tensor)]
        self._aliases = [
            Alias(place, [(every[at][0], every[at][1].parameter) for at in memory.of(place.tensor)])
            for place in places
            if memory.of(place.tensor)
        ]
        """Buffers that travel as the weights whose memory they have."""
        for place in self._places:
            at = memory.in_part(place.tensor)
            if at is not None and self._how not in OWNS:
                raise NotSupportedError(
                    f"the buffer '{place.name}' has memory of the parameter '{self.every[at].name}'"
                    " and other memory, too: give it its own by clone(), or use buffers='own'"
                )
        self._model = model
        inside = {id(parameter) for parameter in model.parameters()}
        self._of_model = {
            one.name: one.parameter for one in self.every if id(one.parameter) in inside
        }
        """The model's own, by name, until the first step."""
        untrained_places(model, self._trained(), self._devices)  # refuses what it refuses
        self._older: Set[int] = set()
        """Ids of the parameters of what has shared the model before, if this follows it."""
        self.buffers: List[Buffers] = []
        self._untrained: Optional[Untrained] = None
        self._replaced = False
        """Whether other steps train its parameters now."""

    @property
    def chosen_buffers(self) -> Optional[str]:
        """Whose buffers are after each step; None where the rule says so."""
        return self._how if self._chosen else None

    def follow(self, older: SharedModel) -> None:
        """Has this be in place of `older`, which has shared the model. What that has given all is
        left as it is: a forward pass may have written to each worker's own buffers, and a backward
        pass may need the parameters."""
        self._older = {*older.of_parameter}
        self.buffers = [*older.buffers]
        self._first_places, self._other_buffer = older._first_places, older._other_buffer
        for buffers in self.buffers:
            buffers.stay(self)

    def begin(self, steps: Steps, why: str = "") -> None:
        """Has `steps` train the parameters, in place of older ones, and gives all workers rank 0's
        values. `why`: this worker's reason, for one that waits for the others in vain."""
        for weight in self.every:
            older = _STEPS_OF.get(id(weight.parameter))
            if older is not None:
                older.stop()
        self.belong_to(steps)
        forget_with(self, self.worker, self._own.number, self.buckets)
        for bucket in self.buckets:
            if isinstance(bucket, Table):
                bucket.steps = steps
        self._own.has_optimizer(len(self.every), self._uses, same_names=True)
        self.worker.barrier("to share the model", why)
        EARLY.start()
        self._devices.start()
        self._exchange_initial()
        self.resuming.wait_for_states(self.worker.barrier)
        its = [] if self._other_buffer else self._places  # or torch broadcasts them
        places = [place for place in its if kept(place) is None]
        made = places and Buffers(places, self._how, self.worker, self._own, self._devices)
        for place in its:
            buffers = kept(place)
            if buffers is not None and buffers not in self.buffers:
                buffers.join(self, self._how, self._chosen, gives=buffers is not made)
                self.buffers.append(buffers)

    def belong_to(self, steps: Steps) -> None:
        """Has `steps` train the parameters. Their values come before the worker leaves."""
        for weight in self.every:
            _STEPS_OF[id(weight.parameter)] = steps
        if not _ALL:
            this_process.at_end(_finish)
        _ALL[:] = [one for one in _ALL if one[0]() is not None and one[1]() is not self]
        _ALL.append((ref(steps), ref(self)))

    def check(self) -> None:
        """Raises the job's failure; NotSupportedError where another optimizer has taken over."""
        self.worker.check()
        if self._own.is_saved:
            settle_all()  # a checkpoint may be due
        if self._replaced:
            raise NotSupportedError(
                "another p3kv.torch.Optimizer has been made with these parameters: call its step()"
            )
        if self._of_model:  # in the first step
            warn_of_replaced(self._model, self._of_model)
            self._of_model = {}

    @property
    def weights(self) -> List[torch.Tensor]:
        """All parameters as tensors."""
        return [weight.parameter for weight in self.every]

    @property
    def other_buffer(self) -> str:
        """The name of a buffer that the model has got since they travel, or that has another shape,
        dtype or device, or is gone; of the first that a forward pass has found. Or else empty."""
        if not self._other_buffer and self._how == IN_FORWARD:
            changed = self._first_places ^ {*places_of(self._model, self._how, self._devices)}
            self._other_buffer = min((place.name for place in changed), default="")
        return self._other_buffer

    def give_up_buffers(self) -> None:
        """Others have buffers travel, all of which are there.
        Raises NotSupportedError where there are checkpoints, which would not have them."""
        if self._own.is_saved:
            raise NotSupportedError(
                f"the buffer '{self._other_buffer}' is new, or has another shape, dtype or device "
                "than when the model was first called, and checkpoints would not have it: register "
                "it before, with the shape that it keeps, or leave out P3KV_CHECKPOINT_DIR"
            )
        for buffers in self.buffers:
            buffers.give_up()
        for alias in self._aliases:
            alias.take()

    def push_buffers(self, attendance: Optional[Attendance] = None) -> None:
        """At the end of a step: shares buffers, unless workers go on without each other.
        `attendance`: the last worker, by rank, that has a batch gives them, as with
        DistributedDataParallel."""
        if own_or_shared(None, self._own.rule) != OWN:
            of_one = any(buffers.are_one_worker_s for buffers in self.buffers)
            giver = None if attendance is None else attendance.present()[-1] if of_one else 0
            for buffers in self.buffers:
                buffers.push(self.pushes.step, giver)
        for alias in self._aliases:
            alias.arm()

    def weights_as_buffers(self) -> Buffers:
        """The parameters as buffers, which any worker may give to all."""
        own = {id(weight.parameter) for weight in self.every}
        others = {id(one) for one in self._model.parameters()} - own
        places = untrained_places(self._model, others, self._devices)
        lacks = own - {id(place.tensor) for place in places}
        for weight in self.every:
            if id(weight.parameter) in lacks and weight.parameter.numel():
                raise NotSupportedError(
                    f"the model has no parameter '{weight.name}', and opt.join() has workers take "
                    "the weights of the model from each other: leave it out of the optimizer"
                )
        return Buffers(places, BROADCAST, self.worker, self._own, self._devices, gives=False)

    def copied(self) -> List[Unpushed]:
        """Copies for a checkpoint of parameters that no optimizer has; on worker rank 0."""
        return [] if self._untrained is None else self._untrained.copied(_STEPS_OF)

    def wait(self) -> None:
        """Waits until all weights and buffers are there."""
        self.exchange.asleep.settle()
        for bucket in self.buckets:
            bucket.wait()
        for buffers in self.buffers:
            buffers.wait()
        for alias in self._aliases:
            alias.take()

    def pull(self) -> None:
        """Gives all weights, which are there, the servers' own values, unrounded."""
        for bucket in self.buckets:
            if not bucket.is_table and any(
                not (one.is_frozen and is_written(one)) for one in bucket.weights
            ):
                self.exchange.pull(bucket, exact=True)
                bucket.arm()
        self.wait()

    def stop(self) -> None:
        """Others take care of the parameters and buffers, all of which are there."""
        for bucket in self.buckets:
            bucket.take()
        for weight in self.every:
            _STEPS_OF.pop(id(weight.parameter), None)
        for buffers in self.buffers:
            buffers.leave(self)
        for alias in self._aliases:
            alias.take()
        self.buffers = []
        self.exchange.stop()
        self._own.leave()
        self._replaced = True

    def close(self) -> None:
        """Ends all threads, at the end of the process."""
        self._devices.close()

    def _declared(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        whole: bool,
        sparse: Mapping[int, str],
    ) -> List[Bucket]:
        names = {id(parameter): own_name(name) for name, parameter in model.named_parameters()}
        parameters = parameters_of(optimizer) if self._by_servers else averaged(optimizer)
        self._num_keys = len(parameters)
        joins = self._own.travels_as_it_is and not whole and self._own.rule.local is None
        groups = [at for at, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        groups += [0] * (len(parameters) - len(groups))
        order = {at: place for place, at in enumerate(names)}
        found: List[Joinable] = []
        for at, parameter in enumerate(parameters):
            name = names.get(id(parameter), f"parameter {at}")
            if (
                parameter.dtype not in DTYPES
                and not parameter.requires_grad
                and id(parameter) in names
            ):
                continue  # quantised ones are frozen for ever
            if isinstance(parameter, TableWeight):
                self._check_table(parameter, name, sparse if self._by_servers else {})
            else:
                check_parameter(parameter, name, self._by_servers)
            group = groups[at] if joins and id(parameter) not in sparse else None
            if not self._by_servers and group is not None:
                group = None if parameter.is_complex() else 0
            found.append(Joinable(at, parameter, name, group))
        found.sort(key=lambda one: order.get(id(one.parameter), len(order)))
        joined = buckets_of(found, self.worker.slice_elems)
        joined.sort(key=lambda bucket: bucket[0].number)
        buckets = [self._declared_bucket(one, whole, sparse) for one in joined]
        every = [weight for bucket in buckets for weight in bucket.weights]
        shared = Memory(weight.parameter for weight in every).shared
        if shared is not None and self._by_servers:
            raise NotSupportedError(
                f"the parameters '{every[shared[0]].name}' and '{every[shared[1]].name}' share "
                "memory, and servers would train each by itself: give each its own by "
                "parameter.data = parameter.data.clone(), or make both the same parameter"
            )
        return buckets

    def _declared_bucket(
        self, joined: List[Joinable], whole: bool, sparse: Mapping[int, str]
    ) -> Bucket:
        at, parameter, name, _ = joined[0]
        shape, copies = tuple(parameter.shape), self._devices.copies(parameter.device)
        if parameter.is_complex():  # as its real and imaginary parts
            shape = (*shape, 2)
        dtype = DTYPES[parameter.dtype.to_real()]
        parameters = [(one.name, one.parameter) for one in joined]
        if len(joined) > 1:
            members = [Member(one.number, tuple(one.parameter.shape), one.name) for one in joined]
            elems = sum(member.size_elems for member in members)
            names = some_of([one.name for one in joined])
            key = self._own.declare(
                at, (elems,), dtype, names, same_name=True, members=members,
                keeps_means=self._keeps_means,
            )  # fmt: skip
            return Bucket(key, parameters, copies)
        kind: Type[Bucket] = Bucket
        initial, by_rows = None, id(parameter) in sparse
        if isinstance(parameter, TableWeight):
            # That of a checkpoint is worker rank 0's to give.
            initial, kind = None if self._goes_on else parameter.initial, Table
        elif by_rows and self._by_servers:
            kind = RowsBucket
        elif by_rows:
            kind, shape = RowSums, counted(shape)
        key = self._own.declare(
            at, shape, dtype, name, LAYOUT if by_rows else "dense", whole, same_name=True,
            initial=initial, keeps_means=self._keeps_means,
        )  # fmt: skip
        return kind(key, parameters, copies)

    @property
    def _goes_on(self) -> bool:
        """Whether initial values are those of a checkpoint."""
        return self._own.resumed is not None and not self._own.was_left

    @staticmethod
    def _check_table(parameter: TableWeight, name: str, sparse: Mapping[int, str]) -> None:
        """Raises NotSupportedError for a table that can't be trained."""
        if id(parameter) not in sparse:
            raise NotSupportedError(
                f"the table '{name}' of a p3kv.torch.Embedding is on the servers, and here "
                "workers update weights: use updates='servers' and P3KV_CONSISTENCY="
                "bulk_synchronous, or torch.nn.Embedding"
            )
        if parameter.table is not None:
            raise NotSupportedError(
                f"the table '{name}' has an optimizer, with which its rows are on the servers: "
                "another one can't take them over"
            )

    def _trained(self) -> Set[int]:
        """Ids of the parameters that this optimizer has, or another one that is in use."""
        return {*_STEPS_OF, *(id(weight.parameter) for weight in self.every)}

    def _exchange_initial(self) -> None:
        for bucket in self.buckets:
            if isinstance(bucket, Table):
                if self.worker.rank == 0 and self._goes_on:
                    stored = self.resuming.initial_rows(bucket.key)
                    if stored is not None:
                        bucket.give(stored)
                    self.resuming.give_state(bucket.key)
                bucket.arm()
                continue
            if self.worker.rank != 0:
                # Or they may be each worker's own by now, by steps that each has made for itself.
                if not self._older.issuperset(id(one.parameter) for one in bucket.weights):
                    self.exchange.pull(bucket)
                    bucket.arm()
                continue
            for weight in bucket.weights:
                saved = self.resuming.initial(weight.key, weight.member)
                if saved is not None:
                    value = tensor_in(np.ascontiguousarray(saved))
                    weight.parameter.data.copy_(value.reshape(weight.shape))
            self.exchange.give_initial(bucket)
            self.resuming.give_state(bucket.key)
            bucket.arm()
        self.wait()
        if self._older:
            return
        memory = Memory(self.weights)
        places = [
            place
            for place in untrained_places(self._model, self._trained(), self._devices)
            if not memory.of(place.tensor)
        ]
        if places:
            self._untrained = Untrained(
                places, self._num_keys, self.worker, self._own, self._devices
            )
            if self.worker.rank == 0:
                self._own.unpushed = self.copied


_STEPS_OF: WeakValueDictionary[int, Steps] = WeakValueDictionary()
"""By the parameter's id: what trains it."""
_ALL: List[Tuple[ReferenceType[Steps], ReferenceType[SharedModel]]] = []
"""All steps of this process that are there, in the order in which they were made."""


def trained_by(parameters: Sequence[torch.Tensor]) -> Optional[Steps]:
    """What trains these parameters, if it trains no others but frozen ones."""
    found = (_STEPS_OF.get(id(parameter)) for parameter in parameters)
    steps = next((one for one in found if one is not None), None)
    return steps if steps is not None and steps.trains(parameters) else None


def _finish() -> None:
    """Before the worker leaves: all values come, or the script has failed."""
    has_failed = this_process.give_up_if_script_failed()
    if not has_failed:
        with suppress(P3Error):
            push_owed(is_last=True)
    for of_steps, of_shared in reversed(_ALL):
        steps, shared = of_steps(), of_shared()
        if steps is None or shared is None:
            continue
        if not has_failed:
            shared.worker.script_ends()
            with suppress(P3Error):  # which the worker tells
                steps.settle()
        shared.close()
    EARLY.close()
