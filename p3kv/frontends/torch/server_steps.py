"""Steps that servers make: gradients leave during `backward`, and new weights come."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch

from p3kv.common.combinations import Feature
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.clipping import Clipping
from p3kv.frontends.torch.exchange import refuse_second
from p3kv.frontends.torch.optimizers.optimizer_settings import needs_whole
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.optimizers.states import exported, imported, unrounded
from p3kv.frontends.torch.refusals import check_all_stay
from p3kv.frontends.torch.rows import check_rows, sparse_weights
from p3kv.frontends.torch.shared_model import SharedModel
from p3kv.frontends.torch.steps import Steps, evaluated
from p3kv.frontends.torch.values.written import copied, is_written
from p3kv.server.optimizer import State
from p3kv.store.states import give_state, states_of
from p3kv.worker.saving.cuts import Unpushed
from p3kv.worker.stores import WorkerStore


class ServerSteps(Steps):
    """Has each gradient leave when it is complete, and servers update the weights by the script's
    optimizer and the mean of all workers' gradients."""

    def __init__(
        self,
        own: WorkerStore,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str],
        syncs: Callable[[], bool],
    ) -> None:
        """`buffers` as in `SharedModel`; `syncs()`: whether a backward pass belongs to no
        `no_sync`.

        Raises NotSupportedError for an optimizer, a parameter or a buffer that can't be shared.
        """
        super().__init__(optimizer)
        self._own = own
        self._syncs = syncs
        self._whole = needs_whole(optimizer)
        """Whether servers update whole tensors, and not slices."""
        sparse = sparse_weights(model, optimizer)
        check_rows(optimizer, sparse)
        shared = self._shared = SharedModel(own, model, optimizer, buffers, self._whole, sparse)
        self._late = {id(late.parameter): late for late in shared.every}
        self._exchange = shared.exchange
        self._pushes = shared.pushes
        worker = self._worker = shared.worker
        self._clipping = Clipping(own, self._pushes.clipping, worker.num_workers, worker.barrier)
        shared.resuming.set_optimizer(
            TorchScriptOptimizer(
                optimizer,
                {at: late.key.key for at, late in self._late.items()},
                self._pushes.step,
                worker.num_workers,
                own.codec_applies_momentum,
                sparse,
            )
        )
        self._hooks: Dict[int, Any] = {}
        """By the parameter's id."""
        shared.begin(self)
        if worker.rank == 0:
            own.unpushed = self._frozen
        self._add_hooks()

    @torch._disable_dynamo
    def _ready(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: torch's hook, in the thread that runs `backward`."""
        if not self._syncs() or parameter.grad is None:
            return
        late = self._late[id(parameter)]
        if late.pushed or late.leaving is not None:
            refuse_second(late)
        self._exchange.note(late)
        if self._clipping.is_known and not self._own.waits_for_cut:
            self._exchange.push(late)

    def clip(self, max_norm: float) -> torch.Tensor:
        self._shared.check()
        check_all_stay(self._worker.settings, "a step that is clipped by the mean gradient's norm")
        self._clipping.begin()
        self._exchange.push_remaining(self._shared.every)
        return self._clipping.clip(max_norm)

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        loss = evaluated(closure)
        self._shared.check()
        every = self._shared.every
        self._exchange.push_remaining(every)
        self._clipping.end_step()
        self._add_hooks()
        assert self._pushes.optimizer is not None
        if self._pushes.optimizer.has_changed():
            raise NotSupportedError(
                "the optimizer's param_groups were changed between backward, when the first "
                "gradient left, and step(): change learning rates before backward, or call the "
                "scheduler after step()"
            )
        torch.autograd.graph.increment_version([late.parameter for late in every])
        for late in every:
            late.pushed = False
            if late.leaving is not None:
                late.leaving.step_ends()
                late.leaving = None
            if late.parameter.requires_grad:
                late.value_version = late.parameter._version
            late.arm()
        self._shared.push_buffers()
        self._exchange.end_step(every)
        return loss

    def wait(self) -> None:
        """Waits for the last norm, too."""
        self._shared.wait()
        self._clipping.wait()

    def synchronize(self) -> None:
        self.wait()
        self._shared.pull()

    def stop(self) -> None:
        self.wait()
        self._shared.stop()
        for hook in self._hooks.values():
            hook.remove()

    def check_states(self, call: str) -> None:
        self._own.combine({Feature.STATES}, call)

    def fetch_states(self) -> None:
        self.wait()
        for late in self._shared.every:
            states = states_of(self._own, late.key, self._whole)
            if states:
                self._optimizer.state[late.parameter] = imported(
                    State.joined(states),
                    None if self._whole else late.parameter.shape,
                    late.device,
                )

    def give_states(self, state_dict: Dict[str, Any]) -> None:
        """All workers call it: worker rank 0 gives the servers its own."""
        held = self._optimizer.state
        for parameter, values in unrounded(state_dict, self._optimizer.param_groups):
            held[parameter].update(values)
        self.wait()
        self._worker.barrier("to load optimizer states")
        if self._worker.rank == 0:
            assert self._pushes.optimizer is not None
            since_step = self._pushes.optimizer.since_step
            for late in self._shared.every:
                state = held.get(late.parameter)
                given = exported(state, since_step, self._whole) if state else None
                give_state(self._own, late.key, given, self._whole)
        self._worker.barrier("to go on with loaded optimizer states")

    @property
    def takes_scaled_gradients(self) -> bool:
        """Refused: GradScaler unscales gradients that have left, and a worker knows of its own
        overflows alone."""
        raise NotSupportedError(
            "GradScaler changes gradients after they have left; train in bfloat16 or float32, "
            "which need no scaling, or give GradScaler(enabled=False)"
        )

    def _add_hooks(self) -> None:
        """Hooks of parameters that have none, unless they are frozen."""
        for at, late in self._late.items():
            parameter = late.parameter
            if parameter.requires_grad and at not in self._hooks:
                self._hooks[at] = parameter.register_post_accumulate_grad_hook(self._ready)

    def _frozen(self) -> List[Unpushed]:
        """Copies for a checkpoint of what servers do not have: frozen weights that the script has
        written to."""
        frozen = (late for late in self._shared.every if not late.parameter.requires_grad)
        return [*(copied(late) for late in frozen if is_written(late)), *self._shared.copied()]
