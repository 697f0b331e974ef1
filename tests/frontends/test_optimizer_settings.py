"""Optimizers as plain data: what arrives is the same optimizer, and nothing but an optimizer."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.errors import ConfigError, NotSupportedError, ProtocolError
from p3kv.frontends.mxnet.optimizers import optimizer_settings
from p3kv.frontends.mxnet.optimizers.optimizer_settings import SharedNumber, built, plain, read
from p3kv.frontends.mxnet.optimizers.server_optimizer import MXNetOptimizer
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.server.optimizer import WHOLE
from p3kv.wire.messages import DeclaredKey, decode, encode
from tests.jobs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
import optimizers


def to_bytes(optimizer: mx.optimizer.Optimizer, since_step: int) -> bytes:
    return encode(plain(optimizer, since_step))


def from_bytes(data: bytes) -> mx.optimizer.Optimizer:
    return built(read(data))


# What a server counts itself, and what never leaves the worker.
OWN = set(optimizer_settings._NOT_SENT)


def as_list(value: Any) -> Any:
    """Attributes without the difference between tuples and lists."""
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", list(optimizers.ALL))
def test_an_optimizer_arrives_with_all_its_attributes(name: str) -> None:
    sent = optimizers.made(name)
    settings = read(to_bytes(sent, 5))
    assert settings.since_step == 5
    arrived = built(settings)
    assert type(arrived) is type(sent)
    assert vars(arrived).keys() == vars(sent).keys()
    for attribute in vars(sent).keys() - OWN:
        assert as_list(getattr(arrived, attribute)) == as_list(getattr(sent, attribute)), attribute
    assert arrived.num_update == sent.begin_num_update


@pytest.mark.parametrize("name", list(optimizers.SCHEDULERS))
def test_a_scheduler_s_rate_for_the_update_arrives(name: str) -> None:
    make = optimizers.SCHEDULERS[name]
    sent, alone = optimizers.made("sgd", lr_scheduler=make()), make()
    for update in range(1, 12):
        sent.num_update = update
        arrived = from_bytes(to_bytes(sent, 0))
        assert arrived.lr_scheduler is None
        assert arrived.learning_rate == alone(update)


def test_equal_settings_give_equal_bytes_and_others_give_others() -> None:
    first, second = (optimizers.made("adam") for _ in range(2))
    assert to_bytes(first, 0) == to_bytes(second, 0)
    # Counting updates is no change of settings.
    first._update_count(3)
    assert to_bytes(first, 0) == to_bytes(second, 0)
    assert to_bytes(first, 1) != to_bytes(second, 0)
    first.set_learning_rate(0.25)
    assert to_bytes(first, 0) != to_bytes(second, 0)


@pytest.mark.parametrize("rate", [np.float64(0.25), np.float32(0.25), np.int64(2), 1])
def test_numbers_of_numpy_are_numbers(rate: Any) -> None:
    sent = optimizers.made("sgd")
    sent.set_learning_rate(rate)
    assert from_bytes(to_bytes(sent, 0)).lr == rate


def test_what_is_no_plain_value_is_refused_where_it_is() -> None:
    sent = optimizers.made("sgd")
    sent.hook = print
    with pytest.raises(NotSupportedError, match=r"SGD\.hook is a builtin"):
        to_bytes(sent, 0)


@given(st.binary(max_size=100))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_bytes(data)


@pytest.mark.parametrize(
    "name", ["Halving", "Optimizer", "create", "os", "__class__", "", "bynorm", "sgd"]
)
def test_nothing_but_the_known_optimizers_is_built(name: str) -> None:
    settings = decode(to_bytes(optimizers.made("sgd"), 0), optimizer_settings.PlainOptimizer)
    with pytest.raises(ConfigError, match=f"know no optimizer '{name}'.* P3KV_OPTIMIZERS"):
        from_bytes(encode(msgspec.structs.replace(settings, name=name)))


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": "much"},
        {"begin_num_update": None},
        {"idx2name": 3},
        {"update": 1},
        {"__class__": "SGD"},
        {"create_state": None},
    ],
    ids=str,
)
def test_attributes_with_which_no_update_can_run_are_protocol_errors(changes: dict) -> None:
    settings = decode(to_bytes(optimizers.made("sgd"), 0), optimizer_settings.PlainOptimizer)
    attributes = {**settings.attributes, **changes}
    with pytest.raises(ProtocolError, match=next(iter(changes))):
        from_bytes(encode(msgspec.structs.replace(settings, attributes=attributes)))


def test_attributes_that_are_missing_are_a_protocol_error() -> None:
    settings = decode(to_bytes(optimizers.made("sgd"), 0), optimizer_settings.PlainOptimizer)
    with pytest.raises(ProtocolError, match=r"SGD\.\w+ is None"):
        from_bytes(encode(msgspec.structs.replace(settings, attributes={})))


@pytest.mark.parametrize(
    "changes", [{"needed": print, "update": 1}, {"begin_num_update": None}, {"idx2name": 3}]
)
def test_attributes_of_a_user_s_class_are_checked_as_far_as_they_are_mxnet_s(changes: dict) -> None:
    settings = decode(to_bytes(optimizers.made("cubic"), 0), optimizer_settings.PlainOptimizer)
    attributes = {**settings.attributes, **changes, "needed": 3}
    with pytest.raises(ProtocolError, match=f"Cubic.{list(changes)[-1]}"):
        built(msgspec.structs.replace(settings, attributes=attributes))


def test_what_updates_have_left_in_an_optimizer_begins_afresh() -> None:
    for name, attribute in (("nadam", "m_schedule"), ("lars momentum", "cur_lr")):
        used, fresh = optimizers.made(name), optimizers.made(name)
        mx.optimizer.get_updater(used)(0, mx.nd.ones(3), mx.nd.ones(3))
        assert getattr(used, attribute) != getattr(fresh, attribute)
        assert getattr(from_bytes(to_bytes(used, 0)), attribute) == getattr(fresh, attribute)
    used = optimizers.made("lbsgd")
    mx.optimizer.get_updater(used)(0, mx.nd.ones(3), mx.nd.ones(3))
    one, other = (from_bytes(to_bytes(used, 0)) for _ in range(2))
    assert one.cumgrads == {}
    assert one.cumgrads is not other.cumgrads


KEY = DeclaredKey(0, 3, (10,), "float32", [(0, 10)])


def updated(optimizer: MXNetOptimizer, step: int, index: int = 0) -> float:
    """How far a step of gradient 1 moves a weight."""
    weight, total = np.zeros(4, np.float32), np.ones(4, np.float32)
    optimizer.update(KEY, index, weight, total, step)
    assert (weight == weight[0]).all()
    return float(-weight[0])


def of_rate(rate: float) -> bytes:
    return to_bytes(mx.optimizer.SGD(learning_rate=rate, wd=0), 0)


def test_settings_hold_from_their_step_until_the_next_ones_whenever_a_slice_comes() -> None:
    """A worker that does not wait announces settings while slices of old steps are on the way."""
    optimizer = MXNetOptimizer()
    for from_step, rate in ((1, 1.0), (3, 0.5), (4, 0.25)):
        optimizer.configure(from_step, of_rate(rate), 0)
    assert [updated(optimizer, step) for step in (4, 1, 2, 3, 9)] == [0.25, 1, 1, 0.5, 0.25]
    assert [updated(optimizer, step, index=1) for step in (2, 3)] == [1, 0.5]


def test_settings_for_a_step_that_has_others_already_replace_them() -> None:
    optimizer = MXNetOptimizer()
    optimizer.configure(1, of_rate(1.0), 0)
    optimizer.configure(1, of_rate(2.0), 0)
    assert updated(optimizer, 1) == 2


def test_settings_for_the_past_and_updates_before_any_are_protocol_errors() -> None:
    optimizer = MXNetOptimizer()
    optimizer.configure(3, of_rate(1.0), 0)
    with pytest.raises(ProtocolError, match="past step 2"):
        optimizer.configure(2, of_rate(1.0), 0)
    with pytest.raises(ProtocolError, match="no optimizer settings hold for step 2"):
        updated(optimizer, 2)


def of_multipliers(lr_mult: float, wd_mult: float) -> mx.optimizer.Optimizer:
    """SGD with a parameter of its own multipliers, as gluon's Trainer makes it."""
    parameter = mx.gluon.Parameter("w", shape=(4,))
    parameter.lr_mult, parameter.wd_mult = lr_mult, wd_mult
    return mx.optimizer.SGD(learning_rate=0.5, wd=0.1, param_dict={KEY.key: parameter})


@pytest.mark.parametrize(("lr_mult", "wd_mult"), [(0.25, 1.0), (0.0, 1.0), (2.0, 0.0), (2.0, 4.0)])
def test_a_parameter_s_multipliers_count_on_a_server(lr_mult: float, wd_mult: float) -> None:
    local = of_multipliers(lr_mult, wd_mult)
    weight, gradient = np.full(4, 3.0, np.float32), np.ones(4, np.float32)
    expected = mx.nd.array(weight)
    mx.optimizer.get_updater(local)(KEY.key, mx.nd.array(gradient), expected)
    optimizer = MXNetOptimizer()
    optimizer.configure(1, to_bytes(of_multipliers(lr_mult, wd_mult), 0), 0)
    optimizer.update(KEY, 0, weight, gradient, 1)
    np.testing.assert_array_equal(weight, expected.asnumpy())
    assert to_bytes(of_multipliers(lr_mult, wd_mult), 0) != to_bytes(of_multipliers(1.0, 1.0), 0)


def test_settings_go_when_no_step_needs_them_any_more_and_not_before() -> None:
    optimizer = MXNetOptimizer()
    for step in range(1, 51):
        optimizer.configure(step, of_rate(float(step)), 0)
    optimizer.configure(60, of_rate(60.0), 45)
    assert [updated(optimizer, step) for step in (59, 45, 60)] == [50, 45, 60]
    with pytest.raises(ProtocolError, match="no optimizer settings hold for step 44"):
        updated(optimizer, 44)
    # Those of an older step still hold when the oldest step has none of its own.
    optimizer.configure(61, of_rate(61.0), 55)
    assert updated(optimizer, 55) == 50
    assert len(optimizer._optimizers) == len(optimizer._from_steps) == 3


def test_numbers_that_keys_share_go_when_no_step_needs_them_any_more() -> None:
    optimizer = MXNetOptimizer()
    worker = WorkerOptimizer(optimizers.made("nadam"), 0)
    optimizer.configure(1, worker.settings, 0)
    for step in range(1, 30):
        number = worker.shared_number(KEY.key, step)
        assert number is not None
        optimizer.configure(step, number, max(0, step - 2))
        if step < 20:
            updated(optimizer, step)
    assert len(optimizer._shared_numbers) == 3
    with pytest.raises(ProtocolError, match="no schedule for update 20 of key 3"):
        updated(optimizer, 20)


@pytest.mark.parametrize("attribute", ["lr_scheduler", "update", ""])
def test_a_shared_number_is_one_of_those_that_there_are(attribute: str) -> None:
    with pytest.raises(ProtocolError, match="no number that updates share"):
        SharedNumber(3, 1, 0, attribute, 0.5)


def test_a_class_that_changes_what_all_keys_share_is_refused() -> None:
    optimizer = MXNetOptimizer()
    optimizer.configure(1, to_bytes(mx.optimizer.create("forgetful"), 0), 0)
    with pytest.raises(NotSupportedError, match=r"Forgetful\.calls.* create_state"):
        updated(optimizer, 1)


def test_classes_say_whether_they_need_whole_tensors() -> None:
    whole = {*optimizers.WHOLE_OPTIMIZERS, "sgld", "jittering"}
    for name in optimizers.ALL:
        optimizer = MXNetOptimizer()
        assert not optimizer.whole_tensors
        optimizer.configure(1, to_bytes(optimizers.made(name), 0), 0)
        assert optimizer.whole_tensors == optimizer.needs_whole(1) == (name in whole), name
        assert WorkerOptimizer(optimizers.made(name), 0).needs_whole_tensors == (name in whole)


def test_some_steps_may_need_whole_tensors_and_others_not() -> None:
    optimizer = MXNetOptimizer()
    for from_step, name in ((1, "sgd"), (3, "lamb"), (5, "adam")):
        optimizer.configure(from_step, to_bytes(optimizers.made(name), from_step - 1), 0)
    assert [optimizer.needs_whole(step) for step in range(1, 7)] == [0, 0, 1, 1, 0, 0]
    optimizer.configure(6, of_rate(1), 5)
    assert not optimizer.whole_tensors


def test_noise_differs_between_keys_and_updates_and_has_the_right_size() -> None:
    optimizer = MXNetOptimizer()
    mx.random.seed(1)
    sgld = mx.optimizer.SGLD(learning_rate=0.04, wd=0)
    optimizer.configure(1, WorkerOptimizer(sgld, 0).settings, 0)
    noises = []
    for key_id in (0, 1):
        key = DeclaredKey(key_id, key_id, (100, 100), "float32", [(0, 10_000)])
        weight, total = np.zeros(10_000, np.float32), np.zeros(10_000, np.float32)
        for step in (1, 2):
            before = weight.copy()
            optimizer.update(key, WHOLE, weight, total, step)
            noises.append(weight - before)
    assert np.abs(np.corrcoef(noises) - np.eye(4)).max() < 0.06
    assert np.abs(np.std(noises, axis=1) - 0.2).max() < 0.01
