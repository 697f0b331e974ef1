"""Interface of a consistency rule, and the table from which a job chooses one by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Optional, Set

from p3kv.common.combinations import Feature
from p3kv.common.registry import Registry
from p3kv.errors import ConfigError, in_one_line

_CHECKED_ROUNDS = 100
_CHECKED_PUSHES = 10_000
"""For how many rounds, and pushes, a new rule is asked before it is used."""


class LocalTraining(NamedTuple):
    """How workers train by themselves, and what becomes of it."""

    steps: int
    """Each key is exchanged once in so many steps."""
    rate: float
    """Learning rate of the outer optimizer, which updates the servers' values by the mean of what
    the workers push: by how much their weights differ from the last value."""
    momentum: float
    """Its momentum, Nesterov's; 0: none."""
    streaming: bool
    """Whether keys take turns, and workers go on meanwhile. Else all keys are exchanged after the
    same step, and workers wait for the values."""
    delay: int
    """Of streaming: for how many steps a worker goes on beyond those that its link needs."""
    adds: bool = False
    """Whether what workers have learned is added up, and not averaged: what a worker's optimizer
    does then counts with this worker's part of all, also on its own weights."""

    @property
    def chosen(self) -> str:
        """A setting that chooses it."""
        if self.adds:
            return f"bounded:staleness={self.steps - 1},lazy=1"
        streaming = f"true,delay={self.delay}" if self.streaming else "false"
        steps = f"steps={self.steps},rate={self.rate},momentum={self.momentum}"
        return f"local:{steps},streaming={streaming}"


class Consistency(ABC):
    """Decides which pushes are exchanged, and which value lets a worker go on.

    Every worker and every server makes one object, with the number of workers. All objects must
    answer alike, so an answer depends on the arguments and on nothing else. Round 0, in which
    worker rank 0 alone gives the initial value, ends without the rule. Any other ends with the
    push of the last worker; or with each push, where rounds are each worker's own.
    """

    window = 2
    """How many rounds of a key may be open, at least 1. A worker pushes for a round only when the
    one `window` before has ended on all servers of the key. So no worker is further ahead, and this
    bounds a server's memory."""

    own_rounds = False
    """Whether each worker's rounds of a key are its own, after the initial one. Then each push is a
    round by itself, and the server updates the value with it at once, but in the order of this
    worker's rounds. This needs an optimizer on the servers. Slices of such a key keep the job's
    first size: no round comes for all workers alike, from which another size could hold."""

    predicts = 0
    """For how many updates ahead the servers predict the values with which they answer pushes, by
    the optimizer's rule for that. What they keep, save and answer pulls with is the true value.
    Keys of rows are never predicted: their values come by pulls."""

    damped = False
    """Whether predictions take it that no more gradients come, so that momentum decays, and not
    that gradients stay what momentum has made of them."""

    local: Optional[LocalTraining] = None
    """How workers train between two exchanges, where each updates its weights itself. Then front
    ends push differences of weights, every some steps, and each of these pushes is a round. None:
    pushes are gradients."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    @abstractmethod
    def needs(self, round: int) -> int:
        """Round for which a worker waits before it goes on after its push for `round`.

        Where workers share rounds: the round whose value it goes on with, never later than its own.
        The worker has this value as soon as it has arrived, also where its own push has not left,
        and exactly this one: what it computes does not depend on when values arrive. Without an
        optimizer on the servers a value is the sum of one round, and workers always wait for that
        of their own. So do pulls.

        Where rounds are each worker's own: the round that all the others must have reached. The
        value then has the pushes of each of them for so many rounds, and of this worker all. Until
        it has, the worker waits, and so does its next push if the window admits no more.
        """

    def exchanges(self, push: int) -> bool:
        """Whether a worker's push number `push` of a key, from 1, is exchanged with the others.

        If not, its gradient is added on the worker to what the next one that is exchanged brings
        along; the weight stays as it is. Rounds and updates count what is exchanged only. This
        needs an optimizer on the servers, and keys of slices.
        """
        return True

    @cached_property
    def exchanges_all(self) -> bool:
        """Whether every push is exchanged, as far as asked."""
        return all(self.exchanges(push) for push in range(1, _CHECKED_PUSHES))

    @cached_property
    def lets_go_ahead(self) -> bool:
        """Whether a worker may go on with the value of a round before its own, which others share,
        as far as asked."""
        rounds = range(1, _CHECKED_ROUNDS)
        return not self.own_rounds and any(self.needs(round_) < round_ for round_ in rounds)

    def goes_on_with(self, round: int) -> Optional[int]:
        """The round with whose value a worker goes on after its push for `round`, where that may be
        an earlier one that others share; None where it waits for what its own push brings."""
        return self.needs(round) if self.lets_go_ahead else None

    @property
    def waits_for_each_round(self) -> bool:
        """Whether a worker pushes in a step when it has the values of the step before, which are
        the same on all workers."""
        return not (self.own_rounds or self.lets_go_ahead or self.local)

    @property
    def workers_differ(self) -> bool:
        """Whether each worker has something of its own between two steps, which checkpoints have
        of each."""
        return self.own_rounds or self.local is not None

    @property
    def steps_between_pushes(self) -> int:
        """How many steps a worker makes until it pushes a key again."""
        return 1 if self.local is None else self.local.steps

    @property
    def features(self) -> Set[Feature]:
        """Features that may not go together with others."""
        has = {
            Feature.ASYNCHRONOUS: self.own_rounds,
            Feature.SELDOM: not self.exchanges_all,
            Feature.AHEAD: self.lets_go_ahead,
            Feature.PREDICTS: self.predicts > 0,
            Feature.LOCAL: self.local is not None,
        }
        return {feature for feature, is_so in has.items() if is_so}


CONSISTENCIES: Registry[Consistency] = Registry(
    "consistency", "every worker and server", "P3KV_CONSISTENCY (or the script's consistency)"
)
"""Consistency rules by name."""


def whole_number(value: Any, least: int, rule: str, parameter: str) -> int:
    """A rule's parameter that counts something; ConfigError for anything but a whole number from
    `least` on."""
    if type(value) is not int or value < least:
        raise ConfigError(
            f"the consistency {rule!r} has {parameter}={value!r}; it must be a whole number from "
            f"{least} on"
        )
    return value


def prediction(value: Any, rule: str) -> bool:
    """Whether predictions are damped, by a rule's parameter `predict`; ConfigError for anything but
    true, false and damped."""
    if value != "damped" and not isinstance(value, bool):
        raise ConfigError(
            f"the consistency {rule!r} has predict={value!r}; it must be true, false or damped"
        )
    return value == "damped"


def consistency_of_key(name: Optional[str], of_job: Consistency) -> Consistency:
    """The rule that a key was declared with: that of the job (None), or its store's own, as
    settings spell it. Raises ConfigError as `make_consistency` does."""
    return of_job if name is None else make_consistency(name, of_job.num_workers)


@lru_cache(maxsize=None)  # each key of a store asks, and to look at a rule takes a millisecond
def make_consistency(chosen: str, num_workers: int) -> Consistency:
    """Makes the rule that a setting, or a store, chooses; ConfigError if there is none, or if it
    can't be right."""
    try:
        rule = CONSISTENCIES.make(chosen, num_workers)
        needed = {round_: rule.needs(round_) for round_ in range(1, _CHECKED_ROUNDS)}
        exchanged = {push: rule.exchanges(push) for push in range(1, _CHECKED_PUSHES)}
    except ConfigError:
        raise
    except Exception as error:
        # It may be a user's own.
        raise ConfigError(f"the consistency {chosen!r} failed: {in_one_line(error)}") from error
    if not isinstance(rule.window, int) or rule.window < 1:
        raise ConfigError(
            f"the consistency {chosen!r} has a window of {rule.window!r}; it must be a whole "
            "number from 1 on"
        )
    if not isinstance(rule.predicts, int) or rule.predicts < 0:
        raise ConfigError(
            f"the consistency {chosen!r} predicts {rule.predicts!r} updates ahead; it must be a "
            "whole number from 0 on"
        )
    for push, whether in exchanged.items():
        if not isinstance(whether, bool):
            raise ConfigError(
                f"the consistency {chosen!r} answers {whether!r} when it is asked whether push "
                f"{push} is exchanged; it must be True or False"
            )
    if not any(exchanged.values()):
        raise ConfigError(f"the consistency {chosen!r} exchanges none of {len(exchanged)} pushes")
    for round_, needs in needed.items():
        if not isinstance(needs, int) or needs > round_:
            raise ConfigError(
                f"the consistency {chosen!r} says that round {round_} needs the value of round "
                f"{needs!r}; it must be a whole number, at most the round itself"
            )
        if needs < needed.get(round_ - 1, needs):
            raise ConfigError(
                f"the consistency {chosen!r} says that round {round_} needs the value of round "
                f"{needs}, and the round before it that of round {needed[round_ - 1]}"
            )
    return rule
