"""Messages in data frames, between workers and servers."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Set, Tuple

from p3kv.common.combinations import Feature
from p3kv.common.registry import MAX_CHOICE_CHARS
from p3kv.config import MAX_PATH_CHARS, Settings
from p3kv.wire.header import LAST_ROUND
from p3kv.wire.messages.base import (
    TOKEN_BYTES,
    Message,
    check,
    check_name,
    check_number,
    check_plain,
    check_received,
    check_slice_size,
)
from p3kv.wire.messages.keys import DTYPES, MAX_KEY_ELEMS, MAX_KEY_ID, check_shape

MAX_STATE_ARRAYS = 1024


class JobSettings(Message, frozen=True):
    """The settings that hold for the whole job: all workers have the same. Names and defaults are
    those of `Settings`."""

    slice_size: Optional[int] = Settings.slice_size
    """None: by the network's rate, which all workers will measure."""
    deterministic: bool = Settings.deterministic
    check_finite: bool = Settings.check_finite
    let_workers_leave: bool = Settings.let_workers_leave
    stall_timeout_s: float = Settings.stall_timeout_s
    placement: str = Settings.placement
    consistency: str = Settings.consistency
    encrypt: bool = Settings.encrypt
    checkpoint_dir: Optional[str] = Settings.checkpoint_dir
    checkpoint_every: int = Settings.checkpoint_every
    resume: bool = Settings.resume
    local_aggregation: bool = Settings.local_aggregation
    leave_zero_rows_out: bool = Settings.leave_zero_rows_out
    updates: Optional[str] = Settings.updates

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)
        for name in (self.placement, self.consistency):
            check(
                len(name) <= MAX_CHOICE_CHARS,
                f"a name has {len(name)} letters; at most {MAX_CHOICE_CHARS} may",
            )
        check(len(self.checkpoint_dir or "") <= MAX_PATH_CHARS, "a folder's name is too long")
        check_number("the steps between checkpoints", self.checkpoint_every, 1, 2**31 - 1)

    @property
    def features(self) -> Set[Feature]:
        """Features that may not go together with others, but those of the rule."""
        has = {
            Feature.LOCAL_AGGREGATION: self.local_aggregation,
            Feature.LEAVERS: self.let_workers_leave,
            Feature.CHECKPOINTS: self.checkpoint_dir is not None,
        }
        return {feature for feature, is_set in has.items() if is_set}

    @classmethod
    def of(cls, settings: Settings) -> JobSettings:
        """The part of a worker's settings that holds for the whole job."""
        return cls(**{name: getattr(settings, name) for name in cls.__struct_fields__})

    def besides(self, other: JobSettings) -> str:
        """Settings that differ from another worker's, in messages: "slice_size=1"."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        differing = (name for name in values if values[name] != getattr(other, name))
        return ", ".join(f"{name}={values[name]!r}" for name in differing)


class DataHello(Message, frozen=True):
    """A worker's first words to a server, once both have shown that they belong to the job."""

    rank: int
    settings: JobSettings
    process: bytes
    """A number that the worker's process has chosen: no other one can go on in its place."""
    received: int = 0
    """How many bytes it has received from this server over links that have ended."""

    def __post_init__(self) -> None:
        check(len(self.process) == TOKEN_BYTES, f"a token has {len(self.process)} bytes")
        check_received(self.received)


class DataWelcome(Message, frozen=True):
    """A server's answer to it: the connection begins, or goes on."""

    received: int
    """How many bytes it has received from this worker over links that have ended."""

    def __post_init__(self) -> None:
        check_received(self.received)


class SharedMemory(Message, frozen=True):
    """Where a process has memory that other processes of its host may read."""

    pid: int
    descriptor: int
    """The number of its descriptor of the memory."""
    offset: int
    size_bytes: int

    def __post_init__(self) -> None:
        check_number("a process", self.pid, 1, 2**31 - 1)
        check_number("a descriptor", self.descriptor, 0, 2**31 - 1)
        for number in (self.offset, self.size_bytes):
            check_number("a place in memory", number, 0, 2**63 - 1)


class LastRounds(Message, frozen=True):
    """A worker's goodbye to its neighbours."""

    rounds: Dict[int, int]
    """By key, the last round for which it has pushed, if there is any."""

    def __post_init__(self) -> None:
        for key_id, round_ in self.rounds.items():
            check_number("a key", key_id, 0, MAX_KEY_ID)
            check_number("a round", round_, 0, LAST_ROUND)


class SliceSizes(Message, frozen=True, tag="Terms"):  # the tag is the protocol's name for it
    """How large slices are in a round, on which all processes must agree."""

    slice_size: int
    """Most elements in a slice."""
    credit_size: Optional[int] = None
    """Slice size, in elements, that limits what the kernel may hold of a connection's bytes;
    None: `slice_size`."""

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)
        check_slice_size(self.size_for_credit)

    @property
    def size_for_credit(self) -> int:
        """The slice size by which credits are chosen."""
        return self.slice_size if self.credit_size is None else self.credit_size


class Stalled(Message, frozen=True):
    """A round of a key waits for workers that have not pushed."""

    key_id: int
    called: str
    round: int
    missing: List[int]
    arrived: List[int]
    """Ranks of the workers that have pushed, or that wait for the initial value."""
    waited_s: float
    timeout_s: float
    """How long it may wait before the job fails."""

    def __post_init__(self) -> None:
        for seconds in (self.waited_s, self.timeout_s):
            check(0 <= seconds < math.inf, f"a round has waited for {seconds} s")


class ForwardOrder(Message, frozen=True):
    """The order in which the forward pass needs the keys, the first layer's first."""

    key_ids: List[int]


class OptimizerSettings(Message, frozen=True):
    """Worker rank 0's optimizer, as its front end has written it for the same one on servers."""

    front_end: str
    settings: bytes
    in_step: bool = True
    """Whether worker rank 0 has begun a step with it. Until then its script may still change it, so
    no push ends a round by itself."""

    def __post_init__(self) -> None:
        check_name("a front end's name", self.front_end)


class StepPushed(Message, frozen=True, tag="Pushed"):  # the tag is the protocol's name for it
    """How much worker rank 0 has pushed to a server in a step whose gradients are clipped."""

    elems: int

    def __post_init__(self) -> None:
        check_number("a number of elements", self.elems, 0, MAX_KEY_ID * MAX_KEY_ELEMS)


class Squares(Message, frozen=True):
    """Part of a server's sums in the square of a step's norm: the sum of these numbers."""

    parts: List[float]
    share: float = 1.0
    """Number of workers, divided by the sum of their weights."""

    def __post_init__(self) -> None:
        check(0.0 < self.share < math.inf, f"workers that weigh 1 / {self.share} in the mean")


class Scale(Message, frozen=True):
    """By what all sums of a step are multiplied before the optimizer gets them."""

    scale: float
    norm: float
    """Norm of all sums before."""
    pass_on: bool
    """Whether the server tells all workers the norm."""
    is_dropped: bool = False
    """Whether the step changes nothing: no sum comes to the optimizer."""


class Norm(Message, frozen=True):
    """The norm of all sums of a step, and what becomes of the step."""

    norm: float
    is_dropped: Optional[bool] = None
    """Whether the step changes nothing; None: not decided."""


class Vote(Message, frozen=True):
    """Whether a worker, or in a server's answer any, has a step change nothing."""

    drops: bool
    factor: float = 1.0
    """By what the worker has its gradients of the step multiplied: the same on all."""


class StateOutline(Message, frozen=True):
    """Outline of an optimizer's state of a key on one server; the arrays' bytes follow."""

    numbers: Optional[Dict[str, Any]]
    """Values for the whole key; None: it remembers nothing."""
    arrays: List[Tuple[str, str, List[int]]]
    """Name, dtype and shape of each array."""

    def __post_init__(self) -> None:
        check(len(self.arrays) <= MAX_STATE_ARRAYS, "an optimizer's state has too many arrays")
        for name, dtype, shape in self.arrays:
            check(dtype in DTYPES, f"an array {name!r} has dtype {dtype!r}")
            check_shape(f"an array {name!r}", shape)
        check_plain("an optimizer's state", self.numbers)
