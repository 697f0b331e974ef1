"""The emulated accelerator keeps its times, its order and its promises to a store."""

from __future__ import annotations

import statistics
import threading
import time

import mxnet as mx
import pytest

from experiments.emulation.emulator import EmulatedModel, NullStore
from experiments.models import load
from p3kv.frontends.mxnet import engine
from p3kv.report.forecast import Layer, Model, Parameter

pytestmark = pytest.mark.alone

DEADLINE_S = 60.0


def _model(compute_s=0.06, layers=3):
    """A model whose keys run against the forward order, as those of a Trainer may."""
    names = [chr(ord("z") - index) for index in range(layers)]
    parameters = [Parameter(f"{name}_weight", (index + 1, 5)) for index, name in enumerate(names)]
    table = tuple(Layer(p.name[0], (p,), 1.0) for p in parameters)
    return Model("small", 1, compute_s, table, tuple(sorted(parameters)))


@pytest.fixture
def emulate():
    """Makes emulated models, and closes them; no thread of theirs may be left."""
    threads = _threads()
    models = []

    def make(*args, **kwargs):
        models.append(EmulatedModel(*args, **kwargs))
        return models[-1]

    yield make
    for model in models:
        model.close()
        model.close()
    assert _threads() <= threads


def _threads():
    """Python's own threads: the engine's, which have called into Python, stay."""
    return {
        thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }


class _Store(NullStore):
    """Answers each exchange when told to, as an operation of the engine that writes `out`."""

    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    def pushpull(self, key, value, out=None, priority=0):
        self.calls.append((key, priority))
        engine.push(lambda operation: self.answer(key, operation), value, out)


def test_without_a_network_an_iteration_takes_its_stated_time(emulate):
    model = emulate(load("resnet50"), dilation=0.25)
    store = NullStore()
    model.broadcast(store)
    model.run(store, 1)
    walls_s = []
    cpu_s = time.process_time()
    for _ in range(4):
        started_s = time.perf_counter()
        model.run(store, 4)
        walls_s.append(time.perf_counter() - started_s)
    cpu_s = time.process_time() - cpu_s
    # The best of them: on a busy machine others only ever add time.
    assert min(walls_s) / 4 == pytest.approx(0.305, rel=0.02)
    assert model.efficiency() == pytest.approx(1.0, abs=0.02)
    assert cpu_s < 0.2 * sum(walls_s)


def test_operations_end_on_time(emulate):
    """As punctual as a thread of this machine is, seen by who waits for their arrays."""
    seen_ns, sleeper_late_ns = [], []

    def answer(key, operation):
        seen_ns.append(time.monotonic_ns())
        operation.complete()

    def sleep():
        while not done.is_set():
            wake_ns = time.monotonic_ns() + 10_000_000
            done.wait(0.01)
            sleeper_late_ns.append(time.monotonic_ns() - wake_ns)

    done = threading.Event()
    sleeper = threading.Thread(target=sleep)
    model = emulate(_model(compute_s=0.15))
    sleeper.start()
    model.run(_Store(answer), 6)
    mx.nd.waitall()
    done.set()
    sleeper.join(DEADLINE_S)
    ends_ns = [span.end_ns for span in model.spans if span.phase == "backward"]
    late_ns = [seen - end for seen, end in zip(seen_ns, ends_ns)]
    assert len(late_ns) == 6 * 3
    assert min(late_ns) >= 0
    # Alone on the machine, medians are 0.1 ms here and there.
    assert statistics.median(late_ns) < 1e6 + 2 * statistics.median(sleeper_late_ns)


def test_layers_run_one_at_a_time_forward_and_back(emulate):
    model = emulate(_model())
    model.run(NullStore(), 2)
    spans = model.spans
    once = [(layer, "forward") for layer in "zyx"] + [(layer, "backward") for layer in "xyz"]
    assert [(span.layer, span.phase) for span in spans] == once * 2
    assert [span.iteration for span in spans] == [0] * 6 + [1] * 6
    for before, after in zip(spans, spans[1:]):
        assert after.start_ns == before.end_ns  # nothing to wait for, and no drift
    seconds = [(span.end_ns - span.start_ns) / 1e9 for span in spans[:6]]
    assert seconds == pytest.approx([0.06 / 9] * 3 + [0.12 / 9] * 3)


def test_gradients_are_exchanged_by_key_as_gluons_trainer_does(emulate):
    store = _Store(lambda key, operation: operation.complete())
    emulate(_model()).run(store, 1)
    assert store.calls == [(0, 0), (1, -1), (2, -2)]


def test_a_layer_starts_when_its_own_weights_are_back_and_not_before(emulate):
    """The first layer's update takes 50 ms longer than the others'."""
    timers = []

    def answer(key, operation):
        timer = threading.Timer(0.05 if key == 2 else 0.0, operation.complete)
        timers.append(timer)
        timer.start()

    model = emulate(_model())
    iteration_s = model.run(_Store(answer), 8)
    mx.nd.waitall()
    for timer in timers:
        timer.join(DEADLINE_S)
    # Other work only ever adds time, and rarely to most iterations.
    assert 0.059 < iteration_s[0] < min(iteration_s[1:])
    assert statistics.median(iteration_s[1:]) == pytest.approx(0.06 + 0.05, abs=0.02)


def test_a_last_layer_that_is_late_by_less_than_the_forward_pass_costs_nothing(emulate):
    timers = []

    def answer(key, operation):
        timer = threading.Timer(0.1 if key == 0 else 0.0, operation.complete)
        timers.append(timer)
        timer.start()

    model = emulate(_model(compute_s=0.6))
    iteration_s = model.run(_Store(answer), 3)
    mx.nd.waitall()
    for timer in timers:
        timer.join(DEADLINE_S)
    assert min(iteration_s[1:]) == pytest.approx(0.6, rel=0.03)


def test_the_script_runs_two_iterations_ahead_and_no_further(emulate):
    model = emulate(_model(compute_s=1.0))
    started_s = time.perf_counter()
    model.iteration(NullStore())
    model.iteration(NullStore())
    assert time.perf_counter() - started_s < 0.5
    model.iteration(NullStore())
    assert time.perf_counter() - started_s >= 0.999


def test_the_loss_is_ready_after_the_forward_pass(emulate):
    model = emulate(_model(compute_s=0.9))
    model.forward()
    model.backward()
    model.loss.wait_to_read()
    passed_s = (time.monotonic_ns() - model.spans[0].start_ns) / 1e9
    assert 0.3 <= passed_s < 0.8


@pytest.mark.parametrize("apart", [False, True])
def test_a_real_store_trains_the_weights(emulate, apart):
    model = emulate(_model(compute_s=0.01), gradient=1.0, apart=apart)
    store = mx.kv.create("local")
    store.set_optimizer(mx.optimizer.create("test", rescale_grad=0.5))
    model.broadcast(store)
    model.run(store, 4)
    for weight in model.weights.values():
        assert (weight.asnumpy() == 2.0).all()  # "test" adds the rescaled gradient


def test_in_turn_nothing_travels_while_anything_is_computed(emulate):
    """An update of 50 ms hides behind no pass of any other layer."""
    sent_s, timers = [], []

    def answer(key, operation):
        sent_s.append(time.monotonic())
        timers.append(threading.Timer(0.05, operation.complete))
        timers[-1].start()

    model = emulate(_model(compute_s=0.3), in_turn=True)
    model.run(_Store(answer), 3)
    for timer in timers:
        timer.join(DEADLINE_S)
    spans = model.spans
    for iteration in range(3):
        passes = [span for span in spans if span.iteration == iteration]
        sent_ns = [1e9 * at for at in sent_s[3 * iteration : 3 * iteration + 3]]
        assert passes[-1].end_ns <= min(sent_ns)
        following = [span.start_ns for span in spans if span.iteration == iteration + 1]
        assert min(following, default=float("inf")) >= max(sent_ns) + 0.049e9


def test_noise_differs_from_element_to_element_and_stays(emulate):
    model = emulate(_model(), noise=0.5, gradient=3.0)
    before = {key: gradient.asnumpy().copy() for key, gradient in model.gradients.items()}
    model.run(NullStore(), 2)
    for key, gradient in model.gradients.items():
        assert (gradient.asnumpy() == before[key]).all()
    elems = [elem for gradient in before.values() for elem in gradient.flat]
    assert len(set(elems)) == len(elems) == 30
    assert statistics.mean(elems) == pytest.approx(3.0, abs=0.6)
    assert 0.2 < statistics.stdev(elems) < 1.0


@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_that_updates_itself_waits_for_the_sum(emulate, apart):
    model = emulate(_model(compute_s=0.01), gradient=1.0, update_on_kvstore=False, apart=apart)
    store = mx.kv.create("local")
    model.broadcast(store)
    model.run(store, 3)
    mx.nd.waitall()
    for gradient in model.gradients.values():
        assert (gradient.asnumpy() == 1.0).all()


def test_an_update_that_never_comes_is_reported_by_layer(emulate):
    held = []

    def answer(key, operation):
        if key == 1 and not held:
            held.append(operation)
        else:
            operation.complete()

    model = emulate(_model(compute_s=0.01), stall_s=0.3)
    with pytest.raises(TimeoutError, match="forward pass of y in iteration 1"):
        model.run(_Store(answer), 2)
    model.close()
    held[0].complete()
    mx.nd.waitall()  # what waited for the update has gone on, without its delays


def test_a_closed_model_computes_no_more(emulate):
    model = emulate(_model())
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.forward()
