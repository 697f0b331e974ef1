"""torch's DistributedDataParallel, whose models p3kv trains."""

from __future__ import annotations

import functools
import gc
import logging
from contextlib import ExitStack, contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
)
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import distributed
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from p3kv import config
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.alone import meet_alone, warn_alone
from p3kv.frontends.torch.averaged import Averaged
from p3kv.frontends.torch.averages import AverageSteps
from p3kv.frontends.torch.buffer_places import IN_FORWARD, LEFT
from p3kv.frontends.torch.buffers import Buffers, push_owed, push_owed_of
from p3kv.frontends.torch.environment import take_rank
from p3kv.frontends.torch.joining import is_open
from p3kv.frontends.torch.optimizer import Optimizer
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of
from p3kv.frontends.torch.passes import CalledPasses, tell_of_passes
from p3kv.frontends.torch.refusals import MADE_TWICE, WORKERS, is_p3kv_s
from p3kv.frontends.torch.server_steps import ServerSteps
from p3kv.frontends.torch.steps import parameters_of
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")

_CODECS = {
    "allreduce_hook": None, "fp16_compress_hook": "float16", "bf16_compress_hook": "bfloat16",
}  # fmt: skip
"""By the name of a communication hook of torch's: the codec of gradients that does the same; None
where they travel as they are."""


class DistributedDataParallel(TorchParallel):
    """What torch's own class does, with its arguments, checks and attributes, for a model that p3kv
    trains: it gets these methods (`take_over`), and there is no object of this one.

    When it is first called with gradients, `p3kv.torch.Optimizer` is attached to the optimizers
    that have its parameters, whether they were made before or after. What `no_sync` and
    `require_backward_grad_sync` were at the call decides whether gradients add up. `bucket_cap_mb`,
    `find_unused_parameters`, `gradient_as_bucket_view`, `static_graph` and the like change nothing.
    What needs torch's own reducer has it be torch's own again, whose gradients p3kv does not carry.

    Raises what torch's raises; NotSupportedError for parameters in shards.
    """

    is_p3kv_s = False
    """Whether p3kv trains the model; each object has its own."""
    _awaits_backward = False
    """Whether it was called with gradients, and nobody has said that `backward` is next."""
    _had: Optional[Tuple[bool, bool]] = None
    """Whether buffers were to be rank 0's when the call under way began, and whether it has
    gradients; None where none is under way."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        inputs, named = self._pre_forward(*inputs, **named)
        return self._post_forward(self._run_ddp_forward(*inputs, **named))

    def _run_ddp_forward(self, *inputs: Any, **named: Any) -> Any:
        """What scripts' subclasses override, such as mmcv's."""
        return self.module(*inputs, **named)

    def _pre_forward(self, *inputs: Any, **named: Any) -> Any:
        """What torch's does before the module is called, also by others than `forward`, as
        torch.distributed's `replicate`."""
        self._called(inputs, named)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_named = _to_kwargs(
                inputs, named, device, self.use_side_stream_for_tensor_copies
            )
            inputs, named = moved[0], moved_named[0]
        return inputs, named

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        self._had = None
        if torch.is_grad_enabled() and not self.require_backward_grad_sync:
            # Set in the forward pass, as by Lightning's manual optimization.
            self.require_forward_param_sync = False
            for optimizer in _ATTACHED.found(self):
                for one in optimizer.buffers:
                    one.owe_not(id(self))
        return output

    def backward_follows(self) -> None:
        """The module was called. A script's subclass may do so in its own way, and not by
        `forward`, as mmcv's with `train_step`; it tells the reducer alone."""
        if not self._awaits_backward:
            self._called((), {}, begins=False)
        self._awaits_backward, self._had = False, None

    @torch._disable_dynamo
    def _called(self, inputs: Any, named: Any, begins: bool = True) -> None:
        """`begins`: the forward pass does, with rank 0's buffers if that is due, and has not been
        made already."""
        has_gradients, syncs = torch.is_grad_enabled(), self.require_backward_grad_sync
        self._awaits_backward = has_gradients
        if self._had is not None:
            self._forget_call(*self._had)
        self._had = (self.require_forward_param_sync, has_gradients) if begins else None
        attached = _ATTACHED.of(self) if has_gradients else _ATTACHED.found(self)
        if attached and has_gradients:
            is_fed = any(
                isinstance(one, torch.Tensor) and one.grad_fn is not None
                for one in tree_leaves((inputs, named))
            )
            for optimizer in attached:
                optimizer.model_called(id(self), is_fed, syncs)
        buffers = dict.fromkeys(one for optimizer in attached for one in optimizer.buffers)
        syncs_buffers = begins and self.will_sync_module_buffers()
        may_be_other = attached and syncs_buffers
        is_torch_s = may_be_other and any([one.gives_up_buffers() for one in attached])
        if begins:
            push_owed(buffers, id(self))
        for one in buffers if has_gradients and syncs else ():
            one.owe(id(self))
        is_frozen = not any(one.requires_grad for one in self.module.parameters())
        # As a teacher or an average, which no optimizer shares.
        may_train = bool(attached) or (
            not is_frozen and (has_gradients or _ATTACHED.may_train(self))
        )
        if is_torch_s:
            self._sync_other_buffers()
        elif not may_train and syncs_buffers:
            self._sync_buffers()
        if attached or not may_train:
            self.require_forward_param_sync = has_gradients and syncs

    def _forget_call(self, syncs_buffers: bool, had_gradients: bool) -> None:
        """The forward pass before this one has raised. torch tells its reducer when one has ended,
        so all is as before it."""
        self.require_forward_param_sync = syncs_buffers
        for optimizer in _ATTACHED.found(self):
            if had_gradients:
                optimizer._passes.forget_call(id(self))
            for one in optimizer.buffers:
                (one.owe if syncs_buffers else one.owe_not)(id(self))

    def _sync_other_buffers(self) -> None:
        """Has torch give all ranks rank 0's buffers, which are others than when the model was first
        called. Raises NotSupportedError where ranks have different ones."""
        self._assign_modules_buffers()
        own = {
            name: f"{one.dtype} of shape {tuple(one.shape)}"
            for name, one in self.named_module_buffers.items()
        }
        every: List[Dict[str, str]] = [{}] * self.process_group.size()
        distributed.all_gather_object(every, own, self.process_group)
        for rank, theirs in enumerate(every):
            for name in {**every[0], **theirs}:
                first, other = (one.get(name, "not there") for one in (every[0], theirs))
                if first != other:
                    raise NotSupportedError(
                        f"the buffer '{name}' is {first} on rank 0, and {other} on rank {rank}, and"
                        " all are to have rank 0's: have all register or change it alike, or use "
                        "broadcast_buffers=False"
                    )
        self._sync_buffers()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Takes torch's hooks that round gradients, before the model is first called, for all
        models of the job. Others get torch's buckets, from torch's reducer."""
        name = getattr(hook, "__name__", str(hook))
        if name not in _CODECS:
            self.be_torch_s(
                f"the communication hook {name} changes torch's buckets (without it, "
                "P3KV_GRADIENT_CODEC=bfloat16 halves what travels)"
            )
            self.register_comm_hook(state, hook)
            return
        codec = _CODECS[name]
        if codec is not None and config.current().gradient_codec != codec:
            config.configure(gradient_codec=codec)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's hooks in C++, which do the same as those in Python."""
        rounds = comm_hook_type.name == "FP16_COMPRESS"
        made = default_hooks.fp16_compress_hook if rounds else default_hooks.allreduce_hook
        self.register_comm_hook(None, made)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """An epoch in which ranks may have different numbers of batches (`Optimizer.join`)."""
        how = divide_by_initial_world_size, enable, throw_on_early_termination
        with ExitStack() as joined:
            for optimizer in _ATTACHED.of(self):
                if not is_open(optimizer):  # it may be that of another model, too
                    joined.enter_context(optimizer.join(*how))
            yield

    @property
    def own_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Those that it averages: not those that the script has had it ignore."""
        for name, parameter in self.module.named_parameters():
            if name not in self.parameters_to_ignore:
                yield parameter

    def _ddp_init_helper(self, *arguments: Any, **named: Any) -> None:
        """torch's makes the reducer, which averages gradients."""
        self.reducer, self.logger = _Reducer(self, arguments, named), None
        ranks, every = self.process_group.size(), distributed.get_world_size()
        if any(is_p3kv_s(one) for one in self.module.modules()):
            raise NotSupportedError(
                "a DistributedDataParallel is inside of another one, and p3kv trains what the inner"
                " one has: leave one of both out"
            )
        if self.mixed_precision is not None:
            self.be_torch_s("mixed_precision= needs torch's reducer (torch.autocast does not)")
        elif ranks < every:
            self.be_torch_s(f"its process group has {ranks} of the {every} ranks")
        else:
            _ATTACHED.add(self)
            self._passing_sync_batchnorm_handle(self.module)

    def _register_delay_all_reduce_hook(self, **_: Any) -> None:
        """torch's averages some gradients later, and its reducer ignores them."""
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = {*ignored}
        self._delay_all_reduce_params.clear()

    def be_torch_s(self, reason: str) -> None:
        """Has torch train the model. Raises NotSupportedError where p3kv has begun to."""
        if not _ATTACHED.leave_out(self):
            raise NotSupportedError(
                f"{reason}: torch is to train this model, and p3kv does already. Do it before the "
                "model is first called"
            )
        made = self.reducer
        _log.warning("torch trains the model in %s, not p3kv: %s", type(self).__name__, reason)
        this_process.means_it()
        del self.is_p3kv_s  # not to be in copies, which are p3kv's
        self._ddp_init_helper(*made.arguments, **made.named)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        _set_state(self, {**state, "static_graph": False})  # torch's tells its reducer
        self.static_graph = state["static_graph"]

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _register_accum_grad_hook(self) -> None:
        """torch's averages gradients for its compiler."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """torch's reducer measures."""

    def _get_ddp_logging_data(self) -> Dict[str, Any]:
        """torch's reducer has measured it."""
        return {}


class _Reducer:
    """In place of torch's, which libraries and scripts' subclasses tell what follows."""

    def __init__(
        self, model: DistributedDataParallel, arguments: Any, named: Dict[str, Any]
    ) -> None:
        """With what torch makes its own of."""
        self._model = ref(model)
        self.arguments, self.named = arguments, named

    def prepare_for_backward(self, outputs: List[torch.Tensor]) -> None:
        model = self._model()
        if model is not None:
            model.backward_follows()

    def _rebuild_buckets(self) -> bool:
        return False


class WrappedOptimizer(Optimizer):
    """An optimizer of models in DistributedDataParallel, which say when gradients leave."""

    _passes: CalledPasses
    _expects_means = True

    def _new_passes(self) -> CalledPasses:
        return CalledPasses({*map(id, parameters_of(self))})

    def _step_ends(self) -> None:
        super()._step_ends()
        if self._passes.steps == 1:
            is_none = isinstance(self, NoOptimizer)
            called = _ATTACHED.names_beside(self) if is_none else type(self).__name__
            _log.info("trained by p3kv: %s, %s update", called, self.updates)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.updates == WORKERS:
            _ATTACHED.give({*map(id, self.param_groups[-1]["params"])}, self)

    def share_anew(self) -> None:
        _ATTACHED.attach_anew(self)

    def leave(self, taken: Set[int]) -> Set[int]:
        """Leaves parameters to others that have them now; returns the ids of those that stay."""
        self._average(self._averaged.without(taken))
        return self._averaged.extra()

    def _average(self, what: Averaged) -> None:
        changes = len(what.orphans) != len(self._averaged.orphans)
        self._averaged = what
        if changes and isinstance(self._steps, AverageSteps):
            self._steps.share_anew()

    def model_called(self, model: int, is_fed: bool, syncs: bool) -> None:
        """A model is called, as in `Passes.called`."""
        has_passed = isinstance(self._steps, AverageSteps) and self._steps.has_passed
        if has_passed and isinstance(self, NoOptimizer):
            self.step()  # which nobody else does
        if any(one.requires_grad for one in self._averaged.asleep):
            self._average(self._averaged.awake())
            if isinstance(self._steps, ServerSteps):
                self._steps.give_way("the script trains parameters that no optimizer has")
        if self._passes.called(model, is_fed, syncs):
            self._steps.adds_up()

    @property
    def buffers(self) -> List[Buffers]:
        """Those that are rank 0's when a forward pass begins; in joined epochs steps share them."""
        steps = self._steps
        if not isinstance(steps, (AverageSteps, ServerSteps)) or steps._joined is not None:
            return []
        return steps._shared.buffers

    def gives_up_buffers(self) -> bool:
        """Whether torch is to broadcast them, since the model has others now. Raises
        NotSupportedError in joined epochs."""
        steps = self._steps
        if not isinstance(steps, (AverageSteps, ServerSteps)) or not steps._shared.other_buffer:
            return False
        if steps._joined is not None:
            raise NotSupportedError(
                f"the buffer '{steps._shared.other_buffer}' is new, or has another shape, dtype or "
                "device than when the model was first called, and in an epoch in join() the last "
                "rank with a batch gives its buffers: use broadcast_buffers=False, or leave out "
                "join()"
            )
        steps._shared.give_up_buffers()
        return True


class NoOptimizer(torch.optim.Optimizer):
    """For a model whose parameters none of `torch.optim` has: its gradients are means."""

    def step(self, closure: Any = None) -> None: ...


class _Attached:
    """Finds the optimizers of wrapped models, and attaches p3kv to them."""

    number = -1
    """`finish` comes before that of all steps."""

    def __init__(self) -> None:
        self._made: List[ReferenceType[torch.optim.Optimizer]] = []
        """The script's optimizers in the order of their making, the same on all workers."""
        self._number = 0
        """How many have been made."""
        self._of: WeakKeyDictionary[DistributedDataParallel, List[_Reference]] = WeakKeyDictionary()
        self._seen = -1
        """How many had been made when they were last looked for."""
        self._bare: Dict[DistributedDataParallel, None] = {}
        """Models without one that were called since the last backward pass."""
        self._is_alone: Optional[bool] = None
        """Whether this process trains by itself, once it is known."""

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """The script has made an optimizer. Raises NotSupportedError for parameters in shards."""
        _refuse_shards(parameters_of(optimizer))
        _attach_in_steps_of(type(optimizer))
        self._made.append(ref(optimizer))
        self._number += 1

    def add(self, model: DistributedDataParallel) -> None:
        """The script has wrapped a model. What gave its parameters means without an optimizer of
        the script's may be gone on other workers, by garbage collection, and so ends here."""
        is_alone = model.process_group.size() == 1
        if not is_alone and not this_process.is_worker() and config.trial() is None:
            # A child of the script, which alone knows its rank. Servers start meanwhile.
            store = distributed.distributed_c10d._get_default_store()
            take_rank(distributed.get_rank(), distributed.get_world_size(), store)
            this_process.joined()
        own = {*map(id, model.own_parameters)}
        for reference in [*self._made]:
            bare = reference()
            if isinstance(bare, NoOptimizer) and own & {*map(id, parameters_of(bare))}:
                bare._steps.stop()
                self._made.remove(reference)
                self._leave(bare)
        self._of[model] = []
        self._seen = -1

    def leave_out(self, model: DistributedDataParallel) -> bool:
        """Whether p3kv has not begun to train a model, and now never does."""
        has_begun = model in self._bare or bool(self._of.get(model))
        if not has_begun:
            self._of.pop(model, None)
        return not has_begun

    def of(self, model: DistributedDataParallel) -> List[WrappedOptimizer]:
        """Optimizers that train parameters of a model, all of which are attached by then."""
        self.attach()
        found = self.found(model)
        if not found and not self._is_alone:
            self._bare[model] = None
        return found

    def may_train(self, model: DistributedDataParallel) -> bool:
        """Whether an optimizer has parameters of a model."""
        own = {id(one) for one in model.module.parameters()}
        made = [optimizer for one in self._made if (optimizer := one()) is not None]
        return any(id(one) in own for optimizer in made for one in parameters_of(optimizer))

    def found(self, model: DistributedDataParallel) -> List[WrappedOptimizer]:
        """Those that are attached."""
        return [made for one in self._of.get(model, ()) if (made := one()) is not None]

    def begin_pass(self, roots: Sequence[Any]) -> None:
        """A backward pass begins."""

    def finish(self) -> None:
        """A backward pass has ended: gradients of called models that no optimizer has become
        means. Not of others, which garbage collection may have left on some ranks only."""
        bare, self._bare = self._bare, {}
        for model in bare:
            if model.require_backward_grad_sync and not any(one() for one in self._of[model]):
                own = {id(one): one for one in model.own_parameters}
                if any(one.grad is not None for one in own.values()):
                    ours = NoOptimizer(own.values(), {})
                    made = self._attach_one(ours, self._parameters(), {*own})
                    if isinstance(made._steps, AverageSteps):
                        made._steps.exchange_now()

    def names_beside(self, optimizer: torch.optim.Optimizer) -> str:
        """The names of the optimizers that step some of its parameters by themselves."""
        own = {*map(id, parameters_of(optimizer))}
        made = [other for one in self._made if (other := one()) is not None]
        names = {type(one).__name__ for one in made if own & {*map(id, parameters_of(one))}}
        return ", ".join(sorted(names - {"NoOptimizer"})) or "an optimizer that is none of torch's"

    def attach(self) -> None:
        """Attaches p3kv to the newest optimizer of each parameter."""
        models = [*self._of]
        if self._seen == self._number or not models:
            return
        if self._trains_together(models):
            self._attach(self._parameters())
        self._seen = self._number  # what it refuses it refuses again

    def attach_anew(self, optimizer: WrappedOptimizer) -> None:
        """An optimizer has other parameters."""
        self._leave(optimizer)
        self._seen = -1
        self.attach()

    def _parameters(self) -> _Parameters:
        return {model: {*map(id, model.own_parameters)} for model in [*self._of]}

    def _attach(self, parameters: _Parameters) -> None:
        """As `attach`, where there are other workers."""
        averaged = set().union(*parameters.values())
        self._made = [one for one in self._made if one() is not None]
        found: List[torch.optim.Optimizer] = []
        taken: Set[int] = set()
        inside = {id(getattr(one(), "optim", None)) for one in self._made if _keeps_parts(one())}
        for reference in reversed(self._made):
            optimizer = reference()
            if id(optimizer) in inside:  # a ZeroRedundancyOptimizer steps it
                continue
            own = {id(one) for one in parameters_of(optimizer)} if optimizer is not None else set()
            if optimizer is None or not own & averaged:
                continue
            if isinstance(optimizer, Optimizer) and not isinstance(optimizer, WrappedOptimizer):
                raise NotSupportedError(MADE_TWICE)
            if not WrappedOptimizer.may_be(class_of(optimizer)):  # gradients are means
                continue
            if own & taken:
                self._leave(optimizer)
                continue
            taken |= own
            found.insert(0, optimizer)
        new = []
        for optimizer in found:
            models = _models(optimizer, parameters)
            if all(any(one() is optimizer for one in self._of[model]) for model in models):
                assert isinstance(optimizer, WrappedOptimizer)
                taken |= optimizer.leave(taken)
            else:  # or the script has wrapped its model once more
                new.append(optimizer)
        for optimizer in new:
            self._attach_one(optimizer, parameters, taken)

    def give(self, added: Set[int], optimizer: WrappedOptimizer) -> None:
        """An optimizer gets these parameters, to which another one may have seen: no optimizer had
        them."""
        for reference in self._made:
            other = reference()
            if isinstance(other, WrappedOptimizer) and other is not optimizer:
                other.leave(added)

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        """No model has this optimizer any more."""
        if isinstance(optimizer, WrappedOptimizer):
            optimizer._passes.end()
        for references in self._of.values():
            references[:] = [one for one in references if one() is not optimizer]

    def _attach_one(
        self, optimizer: torch.optim.Optimizer, parameters: _Parameters, taken: Set[int]
    ) -> WrappedOptimizer:
        """`taken`: ids of parameters whose gradients others see to; its own are added."""
        models = _models(optimizer, parameters)
        for model in models:
            push_owed_of(model.module)
        every = [one for model in models for one in model.own_parameters]
        trained = {id(one) for model in models for one in model.reducer.arguments[0]}
        averaged = Averaged.of(optimizer, every, trained, taken)
        vars(optimizer)["_averaged"] = averaged
        taken.update(map(id, every))
        # As torch's, which asks once whether there are any.
        gives = any(model.broadcast_buffers and model.modules_buffers for model in models)
        buffers = IN_FORWARD if gives else LEFT
        modules = torch.nn.ModuleList(dict.fromkeys(model.module for model in models))
        whole = modules[0] if len(modules) == 1 else modules
        is_ours = isinstance(optimizer, NoOptimizer)
        if isinstance(optimizer, WrappedOptimizer):
            attached = optimizer
            attached.attach(whole, buffers, None, None)
        else:
            updates = WORKERS if is_ours else None
            attached = WrappedOptimizer(whole, optimizer, buffers, updates=updates)
        for model in models:
            self._of[model].append((lambda: attached) if is_ours else ref(attached))
        bare = [one for one in averaged.bare if one.requires_grad]
        if bare and not isinstance(attached._steps, AverageSteps):
            _log.warning(
                "%s has %d parameters that no DistributedDataParallel has, such as one of shape %s:"
                " torch lets each worker train its own, and p3kv trains the same for all",
                type(optimizer).__name__,
                len(bare),
                tuple(bare[0].shape),
            )
        return attached

    def _trains_together(self, models: List[DistributedDataParallel]) -> bool:
        """Whether this process is a worker, with the others of its process group."""
        sizes = {model.process_group.size() for model in models}
        if not this_process.joined():
            if config.trial() is not None:
                return True
            if max(sizes) > 1:
                raise ConfigError(
                    f"the process group has {max(sizes)} ranks, and this process belongs to no job "
                    "of p3kv's: start each rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
                    "in its environment, as torchrun and 'p3kv launch' do"
                )
            if self._is_alone is None:
                warn_alone("the model in DistributedDataParallel")
            self._is_alone = True
            return False
        workers = this_process.worker().num_workers
        if sizes != {workers}:
            raise ConfigError(
                f"DistributedDataParallel has a process group of {min(sizes - {workers})} ranks, "
                f"and the job has {workers} workers: use the group of all ranks, and start as many "
                "processes as it has"
            )
        self._is_alone = False
        return True

    def lacks(self, optimizer: torch.optim.Optimizer, is_given: bool) -> bool:
        """Whether an optimizer without p3kv steps parameters of a model by other gradients than
        means, which they become if they can. `is_given`: they come from its closure."""
        if self._is_alone is not False or all(one() is not optimizer for one in self._made):
            return False  # as one around another, which steps
        own = {id(one) for one in parameters_of(optimizer) if one.requires_grad}
        with torch._C.DisableTorchFunctionSubclass():
            if not is_given and all(one.grad is None for one in parameters_of(optimizer)):
                return False
        for model in [*self._of]:
            if any(id(one) in own for one in model.own_parameters):
                attached = self.found(model)
                for steps in (one._steps for one in attached):
                    if isinstance(steps, ServerSteps):
                        steps.give_way("several optimizers step the same parameters")
                if not self._of[model] or any(one.updates != WORKERS for one in attached):
                    return True
        return False


_Parameters = Dict[DistributedDataParallel, Set[int]]
"""By the model: the ids of those that it averages."""
_Reference = Callable[[], Optional[WrappedOptimizer]]
_ATTACHED = _Attached()
_set_state: Callable[[TorchParallel, Dict[str, Any]], None] = TorchParallel.__setstate__
"""torch's own."""


@functools.lru_cache(maxsize=None)
def take_over() -> None:
    """From now on p3kv trains what is made of torch's DistributedDataParallel, and a process group
    of a process that no launcher has started has this process alone."""
    for name, ours in vars(DistributedDataParallel).items():
        if not name.startswith(("__", "_abc")) or name == "__setstate__":
            torch_s = vars(TorchParallel).get(name)
            setattr(TorchParallel, name, ours if torch_s is None else _by_maker(ours, torch_s))
    TorchParallel.__new__ = _new_parallel
    make = torch.optim.Optimizer.__init__

    @functools.wraps(make)
    def make_and_note(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> None:
        make(optimizer, *arguments, **named)
        _ATTACHED.note(optimizer)

    torch.optim.Optimizer.__init__ = make_and_note
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            _ATTACHED.note(one)
    register_optimizer_step_pre_hook(_refuse_unattached)
    torch.optim.Optimizer.__getattr__ = _attach_for
    this_process.shares_what_is_wrapped()
    apply = torch.nn.Module._apply

    @functools.wraps(apply)
    def apply_and_note(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        ServerSteps.moving += 1
        try:
            return apply(module, *arguments, **named)
        finally:
            ServerSteps.moving -= 1

    torch.nn.Module._apply = apply_and_note
    schedule = torch.optim.lr_scheduler.LRScheduler.step

    @functools.wraps(schedule)
    def schedule_and_note(scheduler: Any, *arguments: Any, **named: Any) -> None:
        vars(scheduler.optimizer)["_scheduled"] = getattr(scheduler.optimizer, "_scheduled", 0) + 1
        schedule(scheduler, *arguments, **named)

    torch.optim.lr_scheduler.LRScheduler.step = schedule_and_note
    tell_of_passes(_ATTACHED)
    meet_alone()
    _join_ours()


def _join_ours() -> None:
    """Has torch's `Join` of p3kv's models be their `join`."""
    make, leave = Join.__init__, Join.__exit__

    @functools.wraps(make)
    def make_or_join(
        self: Any, joinables: List[Any], enable: bool = True,
        throw_on_early_termination: bool = False, **named: Any,
    ) -> None:  # fmt: skip
        self.of_p3kv = ExitStack()
        self.epochs = []
        ours = [one for one in joinables if getattr(one, "is_p3kv_s", False)]
        if len(ours) < len(joinables):
            names = ", ".join(type(one).__name__ for one in joinables)
            for one in ours:
                one.be_torch_s(
                    f"torch.distributed.algorithms.Join([{names}]) is not of models alone"
                )
            return make(self, joinables, enable, throw_on_early_termination, **named)
        self.epochs = [
            one.join(enable=enable, throw_on_early_termination=throw_on_early_termination, **named)
            for one in ours
        ]

    def enter(self: Any) -> None:
        for one in self.epochs:
            self.of_p3kv.enter_context(one)

    def exit_or_leave(self: Any, *raised: Any) -> None:
        if self.epochs:
            self.of_p3kv.__exit__(*raised)
        else:
            leave(self, *raised)

    Join.__init__, Join.__enter__, Join.__exit__ = make_or_join, enter, exit_or_leave


def _attach_in_steps_of(kind: Type[torch.optim.Optimizer]) -> None:
    """Has p3kv be attached before the first step of a class's optimizers, where the forward pass is
    in the closure: torch's step would go on with what p3kv trains."""
    step = kind.step
    if hasattr(step, "attaches") or issubclass(kind, Optimizer):
        return

    @functools.wraps(step)
    def attach_and_step(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        if not isinstance(optimizer, Optimizer) and (arguments or named):
            _ATTACHED.attach()
        if isinstance(optimizer, Optimizer) and not optimizer._makes_own:
            # Also where the script has got hold of the method before, as accelerate does.
            return type(optimizer).step(optimizer, *arguments, **named)
        return step(optimizer, *arguments, **named)

    made: Any = attach_and_step
    made.__wrapped__, made.attaches = getattr(step, "__wrapped__", step), True
    kind.step = made


def _attach_for(optimizer: torch.optim.Optimizer, name: str) -> Any:
    """What only `p3kv.torch.Optimizer` has: p3kv is attached for it, before a model is called."""
    only_ours = not name.startswith("_") and hasattr(Optimizer, name)
    if only_ours and not isinstance(optimizer, Optimizer):
        _ATTACHED.attach()
        if isinstance(optimizer, Optimizer):
            return getattr(optimizer, name)
    why = ""
    if only_ours:
        why = ": p3kv has it once a model with its parameters is in DistributedDataParallel"
    raise AttributeError(f"'{type(optimizer).__name__}' object has no attribute '{name}'{why}")


def _new_parallel(kind: Type[TorchParallel], *arguments: Any, **named: Any) -> TorchParallel:
    """A DistributedDataParallel, or one of the script's subclass, that p3kv trains."""
    module = named.get("module", *arguments[:1])
    if isinstance(module, torch.nn.Module):
        _refuse_shards(module.parameters())
    made: TorchParallel = object.__new__(kind)
    vars(made)["is_p3kv_s"] = True
    return made


def _by_maker(ours: Callable[..., Any], torch_s: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is p3kv's of models that it trains, and otherwise torch's."""

    @functools.wraps(torch_s)
    def either(model: Any, *arguments: Any, **named: Any) -> Any:
        return (ours if model.is_p3kv_s else torch_s)(model, *arguments, **named)

    return either


def _refuse_shards(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        is_flat = getattr(parameter, "_is_flat_param", False)  # by which torch knows its own
        if is_flat or any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise NotSupportedError(
                f"a parameter is a {'FlatParameter' if is_flat else 'DTensor'}, of which each "
                "worker has a part (FSDP, tensor parallelism), and p3kv trains whole ones: run "
                "this script without p3kv.torch.ddp"
            )


def _refuse_unattached(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> None:
    is_given = len(given) > 1 or bool(named)
    if not isinstance(optimizer, Optimizer) and _ATTACHED.lacks(optimizer, is_given):
        raise NotSupportedError(
            f"{type(optimizer).__name__} steps parameters of a model in DistributedDataParallel, "
            "and p3kv is not attached to it: another optimizer that was made later has them (set "
            "P3KV_UPDATES=workers), or it was made after the last forward pass"
        )


def _models(
    optimizer: torch.optim.Optimizer, parameters: _Parameters
) -> List[DistributedDataParallel]:
    """Those that have an optimizer's parameters, in the order of these."""
    places = {id(one): at for at, one in enumerate(parameters_of(optimizer))}
    found = {model: [places[at] for at in its & {*places}] for model, its in parameters.items()}
    return sorted((model for model in found if found[model]), key=lambda model: min(found[model]))


def _keeps_parts(optimizer: Optional[torch.optim.Optimizer]) -> bool:
    """Whether each worker updates a part of the parameters by it, and then sends them to all."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
