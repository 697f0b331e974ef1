"""Changes to gluon's Trainer for p3kv's stores."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import mxnet as mx

from p3kv import config
from p3kv.common.combinations import Feature, check
from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import fresh_gradients
from p3kv.frontends.mxnet.alone import Alone
from p3kv.frontends.mxnet.checkpoints import declare_now
from p3kv.frontends.mxnet.forward_order import FORWARD_READS
from p3kv.frontends.mxnet.store import P3
from p3kv.frontends.mxnet.stores import is_ours
from p3kv.frontends.mxnet.trial_stores import Other
from p3kv.worker import this_process


def patch() -> None:
    """Changes the class for the whole process; Trainers with other stores are as they were."""
    trainer, parameter = mx.gluon.Trainer, mx.gluon.Parameter
    # With sparse gradients the Trainer takes only stores of this class.
    mx.gluon.trainer.KVStore = (mx.kvstore.KVStore, P3)
    trainer.__init__ = _noting(trainer.__init__)
    trainer._init_kvstore = _naming_keys(trainer._init_kvstore)
    trainer._check_and_rescale_grad = _rescaled(trainer._check_and_rescale_grad)
    trainer.step = _refusing_stale(trainer.step)
    trainer._allreduce_grads = _refusing_old_values(
        _refusing_scaled_losses(_pushing_fresh(trainer._allreduce_grads))
    )
    trainer._update = _updating_with_sums(trainer._update)
    trainer._reset_kvstore = _saying_how(trainer._reset_kvstore)
    parameter.initialize = _known_to_the_trainer(parameter.initialize)
    parameter.set_data = _free_where_never_pushed(parameter.set_data)


def _noting(init: Any) -> Any:
    """Have every new Trainer learn its own forward order, and declare its keys where there are
    checkpoints."""

    @functools.wraps(init)
    def noting(trainer: mx.gluon.Trainer, *arguments: Any, **more: Any) -> None:
        init(trainer, *arguments, **more)
        if is_ours(trainer._kvstore_params["kvstore"]):
            FORWARD_READS.start()
            if this_process.joined() and config.current().checkpoint_dir is not None:
                declare_now(trainer)

    return noting


def _naming_keys(init_kvstore: Any) -> Any:
    """Says what the parameters are called, whose keys are their places. Where weights are sparse,
    MXNet does not say so when it makes the store."""

    @functools.wraps(init_kvstore)
    def naming(trainer: mx.gluon.Trainer) -> None:
        init_kvstore(trainer)
        if isinstance(trainer._kvstore, (P3, Alone)):
            names = [parameter.name for parameter in trainer._params]
            trainer._kvstore.name_keys(dict(enumerate(names)))
        if isinstance(trainer._kvstore, P3):
            trainer._kvstore.has_optimizer(len(names), type(trainer._optimizer).__name__)

    return naming


def _rescaled(check_and_rescale_grad: Any) -> Any:
    """Allows a Trainer another batch size at any step.

    MXNet refuses it where a distributed store updates, because its own servers never learn of it.
    """

    def rescale(trainer: mx.gluon.Trainer, scale: float) -> None:
        if isinstance(trainer._kvstore, (P3, Alone, Other)):
            trainer._optimizer.rescale_grad = scale
        else:
            check_and_rescale_grad(trainer, scale)

    return rescale


def _refusing_stale(step: Any) -> Any:
    """Has a step say whether stale gradients are ignored before it pushes any; MXNet only asks when
    weights are updated, and not at all where servers do that."""

    @functools.wraps(step)
    def stepping(
        trainer: mx.gluon.Trainer, batch_size: float, ignore_stale_grad: bool = False
    ) -> None:
        fresh_gradients.refusing_stale(
            trainer, ignore_stale_grad, lambda: step(trainer, batch_size, ignore_stale_grad)
        )

    return stepping


def _pushing_fresh(allreduce_grads: Any) -> Any:
    """Pushes a gradient once."""

    def allreduce(trainer: mx.gluon.Trainer) -> None:
        if isinstance(trainer._kvstore, (P3, Alone)):
            fresh_gradients.push(trainer, trainer._kvstore)
        else:
            allreduce_grads(trainer)

    return allreduce


def _updating_with_sums(update: Any) -> Any:
    """Update on this worker where any worker had a gradient; nothing is left to do where servers
    update."""

    def updating(trainer: mx.gluon.Trainer, ignore_stale_grad: bool = False) -> None:
        if _servers_update(trainer):
            return
        if isinstance(trainer._kvstore, (P3, Alone)):
            fresh_gradients.check_update(trainer, ignore_stale_grad)
        update(trainer, ignore_stale_grad)

    return updating


def _refusing_scaled_losses(allreduce_grads: Any) -> Any:
    """Refuses a loss that is scaled where servers update. MXNet's scaler looks at a worker's own
    gradients then, after the update: infinity would be in the weights, and where workers change
    their scales at different steps, their gradients would not count alike."""

    def allreduce(trainer: mx.gluon.Trainer) -> None:
        if _servers_update(trainer) and getattr(trainer, "_amp_loss_scaler", None) is not None:
            features = {Feature.SCALED_LOSS, Feature.OPTIMIZER}
            check(features, "this Trainer is one of amp.init_trainer")
        allreduce_grads(trainer)

    return allreduce


def _saying_how(reset_kvstore: Any) -> Any:
    """Has a Trainer say how weights are changed. MXNet says that it can't reset the store, where
    it would have to, because servers keep the weights."""

    def reset(trainer: mx.gluon.Trainer) -> None:
        if _servers_update(trainer):
            raise NotSupportedError(
                "with kvstore='p3' servers keep a Trainer's weights from its first step on, so a "
                "script can't change them. Write update_on_kvstore=False in Trainer, or change "
                "them after you have made a new Trainer"
            )
        reset_kvstore(trainer)

    return reset


def _known_to_the_trainer(initialize: Any) -> Any:
    """Treats a parameter that is initialised once more as MXNet treats one whose data is set. Else
    the next step would bring the old weight back."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def known(parameter: mx.gluon.Parameter, *arguments: Any, **more: Any) -> None:
        again = signature.bind(parameter, *arguments, **more).arguments.get("force_reinit")
        if again and _servers_keep(parameter):
            if parameter.grad_req == "null":
                _note_change(parameter)
            else:
                parameter._trainer._reset_kvstore()
        initialize(parameter, *arguments, **more)

    return known


def _free_where_never_pushed(set_data: Any) -> Any:
    """Lets a script set parameters without gradients, such as running statistics, at any time: no
    step brings the servers' value back. MXNet asks the Trainer whatever the parameter is."""

    @functools.wraps(set_data)
    def free(parameter: mx.gluon.Parameter, data: Any) -> None:
        if parameter.grad_req != "null" or not _servers_keep(parameter):
            set_data(parameter, data)
            return
        trainer, parameter._trainer = parameter._trainer, None
        try:
            set_data(parameter, data)
        finally:
            parameter._trainer = trainer
        _note_change(parameter)

    return free


_CHANGED = "_p3kv_changed"
"""An attribute of a Trainer: the names of parameters that a script has changed while they were
frozen."""


def _note_change(parameter: mx.gluon.Parameter) -> None:
    if parameter._differentiable:  # or it is never trained
        vars(parameter._trainer).setdefault(_CHANGED, set()).add(parameter.name)


def _refusing_old_values(allreduce_grads: Any) -> Any:
    """Refuses to train a parameter again that was changed while it was frozen: the servers would
    bring back what they have."""

    def allreduce(trainer: mx.gluon.Trainer) -> None:
        changed = vars(trainer).get(_CHANGED, ())
        for parameter in trainer._params if changed else ():
            if parameter.name in changed and parameter.grad_req != "null":
                raise NotSupportedError(
                    f"'{parameter.name}' is trained again, and was changed by the script while it "
                    "was frozen (grad_req='null'). With kvstore='p3' servers have its old value. "
                    "Make a new Trainer after such a change, or write update_on_kvstore=False in "
                    "Trainer"
                )
        allreduce_grads(trainer)

    return allreduce


def _servers_keep(parameter: mx.gluon.Parameter) -> bool:
    """Whether the servers update the parameter's Trainer, and have the parameter's value."""
    trainer = parameter._trainer
    return bool(
        trainer is not None
        and _servers_update(trainer)
        and parameter not in trainer._params_to_init
    )


def _servers_update(trainer: mx.gluon.Trainer) -> bool:
    """Whether it is our servers that update the weights; not before the Trainer has its store."""
    return bool(trainer._update_on_kvstore) and isinstance(trainer._kvstore, (P3, Alone))
