"""The table of what can't be combined. All ask it that refuse something, or leave it out."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Collection, List, NamedTuple, Optional, Type

from p3kv.common import words
from p3kv.errors import NotSupportedError, P3Error, StatesError


class Feature(Enum):
    """Something that a job, a store, a key or an optimizer may have, in words."""

    CHECKPOINTS = "checkpoints (P3KV_CHECKPOINT_DIR)"
    LEAVERS = "P3KV_LET_WORKERS_LEAVE=1"
    LOCAL_AGGREGATION = "the sum of a host's workers (P3KV_LOCAL_AGGREGATION)"
    ASYNCHRONOUS = "an asynchronous store or job"
    SELDOM = "a consistency rule of your own that exchanges the sum of several pushes"
    AHEAD = "a consistency rule by which workers go on with older values"
    PREDICTS = "a consistency rule by which servers predict values"
    LOCAL = "a consistency rule, such as local, by which each worker trains by itself"
    CODEC = "a codec"
    REMEMBERING = "a codec of gradients, such as 2bit, that remembers what it has not sent"
    NO_MEMORY = "a codec of gradients that remembers and does not say what"
    REMEMBERS_VALUES = "a codec of values that remembers what it has sent"
    HALF_ENCODED = "a codec of half-precision gradients"
    MOMENTUM = "a codec of gradients, such as dgc, that applies the optimizer's momentum"
    NEEDS_NORM = "a codec of gradients, such as dgc with clip, that needs a whole gradient's norm"
    OTHER_THAN_SGD = "an optimizer other than SGD with momentum (and without clip_gradient)"
    UNCARRIED = "a dtype that the codec is not for, such as integers"
    KEPT_BY_EACH = (
        "a codec of gradients that remembers, in a job with checkpoints or P3KV_LET_WORKERS_LEAVE=1"
    )
    ROWS = "a sparse weight or gradient"
    INTEGERS = "keys of integers"
    OPTIMIZER = "an optimizer on the servers"
    NO_OPTIMIZER = "a store without an optimizer"
    WHOLE_TENSORS = "an optimizer that needs whole tensors"
    SPREAD_OUT = "a key that lies on several servers before its optimizer is set"
    OTHER_CUT = "an optimizer of whole tensors after one of slices (or the reverse)"
    SHARES_NUMBERS = "an optimizer, such as Nadam, by which one key's update depends on others"
    NO_PREDICTION = "an optimizer without a rule for predictions, or of whole tensors"
    NO_GRADIENT = "a step in which a worker lacks a gradient"
    STATES = "saved and loaded optimizer states"
    SCALED_LOSS = "a loss that automatic mixed precision scales"
    CLIPPING = "clipping by the norm of all workers' gradients"
    WEIGHTS = "gradients that count by a weight in the mean of all workers"
    DROPPING = "a step that all workers drop if it is bad on any"
    AT_ONCE = "an engine that completes each operation before it returns"


class Combination(NamedTuple):
    """Two features that can't be had together."""

    one: Feature
    other: Feature
    reason: str
    instead: str
    """Advice to the user. Names in braces are those of a front end's `words.Words`."""
    error: Optional[Type[P3Error]] = NotSupportedError
    """How it is refused; None: `one` has no effect, and the log says so once."""

    @property
    def in_words(self) -> str:
        """Both features, and what becomes of them."""
        if self.error is not None:
            return f"{self.one.value} can't be had with {self.other.value}"
        return f"with {self.other.value}, {self.one.value} has no effect"

    @property
    def advice(self) -> str:
        """Advice in the words of the process's front ends."""
        return self.advice_in(words.current())

    def advice_in(self, spoken: words.Words) -> str:
        """Advice in these words."""
        return self.instead.format(**asdict(spoken))

    @property
    def sentences(self) -> str:
        """The reason, and what to do."""
        advice = self.advice
        return f"{self.reason}. {advice[:1].upper()}{advice[1:]}"


F = Feature
_SEND_ALL = "set P3KV_LOCAL_AGGREGATION=0 if this is meant: each worker sends its own gradients"
_OTHER_RULE = "use a rule that exchanges every push"

TABLE = (
    Combination(
        F.SELDOM, F.CHECKPOINTS,
        "a checkpoint would lack what workers have added up and not sent",
        f"{_OTHER_RULE}, or unset P3KV_CHECKPOINT_DIR",
    ),
    Combination(
        F.LOCAL, F.NO_OPTIMIZER,
        "the script updates weights itself, by the sum of each push",
        "{servers_update}, if workers are to train by themselves",
        None,
    ),
    Combination(
        F.ROWS, F.LOCAL,
        "what a worker has learned by itself is not in the rows that it touches last",
        "use dense arrays, or P3KV_CONSISTENCY=bulk_synchronous",
    ),
    Combination(
        F.MOMENTUM, F.LOCAL,
        "workers push differences of weights, which have the momentum of their own optimizer",
        "use another codec (topk)",
    ),
    Combination(
        F.CLIPPING, F.LOCAL,
        "each worker updates its weights by its own gradients, which servers never see",
        "clip each worker's own gradients in the script, by {clip_own}",
    ),
    Combination(
        F.NO_OPTIMIZER, F.CHECKPOINTS,
        "workers update the weights, and checkpoints would not have them",
        "unset P3KV_CHECKPOINT_DIR and save weights and states in the script, or {servers_update}",
    ),
    Combination(
        F.NO_MEMORY, F.CHECKPOINTS,
        "what a gradient becomes depends on what was encoded before, and a job that goes on would "
        "not have it",
        "write the encoder's method `memory`, use another codec (2bit), or unset "
        "P3KV_CHECKPOINT_DIR",
    ),
    Combination(
        F.NO_OPTIMIZER, F.ASYNCHRONOUS,
        "an asynchronous store's servers would have nothing to update weights with",
        "call {set_optimizer} on every worker first, or {synchronous}",
    ),
    Combination(
        F.NO_OPTIMIZER, F.SELDOM,
        "by this consistency rule not every push is exchanged, so a sum would lack some",
        f"call {{set_optimizer}} on every worker first, or {_OTHER_RULE}",
    ),
    Combination(
        F.AHEAD, F.NO_OPTIMIZER,
        "a value is the sum of one round, and workers wait for that of their own",
        "call {set_optimizer} on every worker first, or set P3KV_CONSISTENCY=bulk_synchronous",
        None,
    ),
    Combination(
        F.ROWS, F.SELDOM,
        "rows can't be added up on a worker until a push is exchanged",
        f"use dense arrays, or {_OTHER_RULE}",
    ),
    Combination(
        F.AHEAD, F.ROWS,
        "rows come by pulls, which wait for the worker's last push",
        "use dense arrays where workers are to go on at once",
        None,
    ),
    Combination(
        F.PREDICTS, F.ROWS,
        "rows come by pulls, which get the true value",
        "use dense arrays where values are to be predicted",
        None,
    ),
    Combination(
        F.PREDICTS, F.NO_PREDICTION,
        "the optimizer can't say what a value will be",
        "use SGD with momentum or Adam, or leave `predict` out of P3KV_CONSISTENCY",
    ),
    Combination(
        F.ROWS, F.REMEMBERING, "what is left of a row would wait until the row is touched again",
        "use another codec (float16), for such keys alone where they have a store of their own, or "
        "dense arrays",
    ),
    Combination(
        F.ROWS, F.REMEMBERS_VALUES, "each worker is sent other rows, and at other times",
        "use another codec (float16), or dense arrays",
    ),
    Combination(
        F.CODEC, F.UNCARRIED,
        "the codec is not for this dtype, so values travel as they are",
        "nothing, if this is meant",
        None,
    ),
    Combination(
        F.MOMENTUM, F.OTHER_THAN_SGD,
        "momentum is applied on the workers before gradients are sent, and by nothing else",
        "use SGD with momentum, and the codec's own `clip`, or another codec (topk)",
    ),
    Combination(
        F.MOMENTUM, F.NO_OPTIMIZER,
        "gradients arrive with their momentum, which the workers' optimizer would apply again",
        "{servers_update}, or use another codec (topk)",
    ),
    Combination(
        F.MOMENTUM, F.SELDOM,
        "a momentum is of single steps, and what workers add up is of several",
        f"{_OTHER_RULE}, or another codec (topk)",
    ),
    Combination(
        F.MOMENTUM, F.CLIPPING,
        "what arrives is not the gradient of one step",
        "use the codec's own `clip`, or another codec (topk)",
    ),
    Combination(
        F.MOMENTUM, F.STATES,
        "the momentum is with the workers' codec, and a file would lack it",
        "use checkpoints (P3KV_CHECKPOINT_DIR), which have both",
        StatesError,
    ),
    Combination(
        F.INTEGERS, F.OPTIMIZER,
        "an optimizer updates floats only",
        "sum integers in a store without an optimizer",
    ),
    Combination(
        F.OTHER_CUT, F.ASYNCHRONOUS,
        "the servers of an asynchronous store can't change from slices to whole tensors, or back, "
        "since other workers' pushes are under way",
        "use a new store",
    ),
    Combination(
        F.WHOLE_TENSORS, F.SPREAD_OUT,
        "it needs whole tensors, and a key stays on the servers on which it lies",
        "call {set_optimizer} before {declare_key}, or {workers_update}",
    ),
    Combination(
        F.SHARES_NUMBERS, F.ASYNCHRONOUS,
        "the update of one key leaves a number for that of the next, and an asynchronous store's "
        "servers update keys in no common order",
        "use another optimizer (Adam, SGD), or {synchronous}",
    ),
    Combination(
        F.SHARES_NUMBERS, F.NO_GRADIENT,
        "the update of another key depends on whether this one is updated, which other workers "
        "know",
        "use another optimizer (Adam, SGD), or {workers_update}",
    ),
    Combination(
        F.STATES, F.ASYNCHRONOUS,
        "a file has one count of updates for each key, and slices of an asynchronous store's keys "
        "may have different ones",
        "{synchronous}",
        StatesError,
    ),
    Combination(
        F.SCALED_LOSS, F.OPTIMIZER,
        "loss scaling has to see the sum of all workers' gradients before weights are updated, and "
        "servers update them",
        "{workers_update}",
    ),
    Combination(
        F.CLIPPING, F.NO_OPTIMIZER,
        "servers clip the gradients by which they update weights, and they have no optimizer",
        "{servers_update}. Or {clip_on_workers}",
    ),
    Combination(
        F.CLIPPING, F.ASYNCHRONOUS,
        "the norm is that of a round of all workers, to which each gradient belongs",
        "{synchronous}",
    ),
    Combination(
        F.CLIPPING, F.SELDOM,
        "the norm is that of one step, and what workers add up is of several",
        _OTHER_RULE,
    ),
    Combination(
        F.DROPPING, F.ASYNCHRONOUS,
        "a worker's gradients change weights without a wait for what the others find",
        "{synchronous}",
    ),
    Combination(
        F.DROPPING, F.SELDOM,
        "what is dropped is one step, and what workers add up is of several",
        _OTHER_RULE,
    ),
    Combination(
        F.DROPPING, F.REMEMBERING,
        "the codec of gradients would send in later steps what it has not sent of a bad one, also "
        "nan",
        "use another codec (float16)",
    ),
    Combination(
        F.CLIPPING, F.AT_ONCE,
        "a push would return with the new weight, which comes after all gradients of its step",
        "{later_engine}",
    ),
    Combination(
        F.WEIGHTS, F.LOCAL,
        "servers get what each worker has learned in some steps, and not its gradients",
        "use P3KV_CONSISTENCY=bulk_synchronous",
    ),
    Combination(
        F.WEIGHTS, F.ASYNCHRONOUS,
        "each gradient is an update by itself, and there is no mean of all workers",
        "{synchronous}",
    ),
    Combination(
        F.WEIGHTS, F.MOMENTUM,
        "what arrives is not the gradient of one step",
        "use another codec (topk)",
    ),
    Combination(
        F.LOCAL_AGGREGATION, F.ASYNCHRONOUS,
        "each worker's push is a round by itself", _SEND_ALL, None,
    ),
    Combination(
        F.LOCAL_AGGREGATION, F.AHEAD,
        "workers of a host need not push for the same round", _SEND_ALL, None,
    ),
    Combination(
        F.LOCAL_AGGREGATION, F.NEEDS_NORM,
        "a sum leaves slice by slice, before all of it is there", _SEND_ALL, None,
    ),
    Combination(
        F.LOCAL_AGGREGATION, F.KEPT_BY_EACH,
        "what is left of a sum is with the worker that sends it: lost when this one leaves, and "
        "another's after a restart", _SEND_ALL, None,
    ),
    Combination(
        F.LOCAL_AGGREGATION, F.HALF_ENCODED,
        "the sum is in single precision, and the codec is for half", _SEND_ALL, None,
    ),
)  # fmt: skip
"""All of it. Of several that apply, the first one is told."""


def among(features: Collection[Feature]) -> List[Combination]:
    """Combinations in the table of which both features are among these."""
    there = {*features}
    if F.REMEMBERING in there and there & {F.LEAVERS, F.CHECKPOINTS}:
        there.add(F.KEPT_BY_EACH)
    return [entry for entry in TABLE if entry.one in there and entry.other in there]


def check(features: Collection[Feature], what: str) -> None:
    """Raise the error of the first refused combination. `what` says what the script has done, or
    with which key: "key 'w' has a sparse gradient"."""
    for entry in among(features):
        if entry.error is not None:
            raise entry.error(f"{what}: {entry.sentences}")


def left_out(features: Collection[Feature]) -> List[Combination]:
    """The combinations among these features in which the first one has no effect."""
    return [entry for entry in among(features) if entry.error is None]


def has_effect(feature: Feature, features: Collection[Feature]) -> bool:
    """Whether a feature is among these, and none of the others leaves it out."""
    return feature in features and all(entry.one is not feature for entry in left_out(features))
