"""Keys of which only touched rows travel, compared with training in one process, bit for bit.

Arguments: a folder for what has been checked; the slice size; then perhaps how many workers of a
host sum their rows.
"""

import sys
import time

import p3kv

p3kv.configure(slice_size=int(sys.argv[2]), deterministic=True)

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from checks import equal, random, read, run  # noqa: E402
from mxnet.kvstore import KVStoreBase  # noqa: E402

from p3kv.errors import KeyMismatchError, NotSupportedError  # noqa: E402
from p3kv.frontends.mxnet.rows import named_rows  # noqa: E402

PER_HOST = int(sys.argv[3]) if len(sys.argv) > 3 else 1
ROWS, COLUMNS = 37, 5
SHAPE = (ROWS, COLUMNS)
ROUNDS = 5
OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.3}),
    ("sgd", {"learning_rate": 0.3, "momentum": 0.9, "wd": 0.01}),
    ("sgd", {"learning_rate": 0.3, "momentum": 0.9, "wd": 0.01, "lazy_update": False}),
    ("adam", {"learning_rate": 0.3, "wd": 0.01}),
    ("adam", {"learning_rate": 0.3, "wd": 0.01, "lazy_update": False}),
    ("adagrad", {"learning_rate": 0.3}),
    ("ftrl", {"learning_rate": 0.3}),
    ("test", {}),
]
"""Lazy ones, which leave rows alone that no worker has touched, and others."""


def touched(rank: int, round_: int) -> np.ndarray:
    """Rows that a worker touches: some by all, some by none, sometimes none."""
    if (rank + round_) % 4 == 3:
        return np.empty(0, np.int64)
    some = np.random.RandomState([rank, round_]).permutation(ROWS - 4)[: 3 + 5 * rank]
    return np.union1d(some, [2, 3])


def gradient(rank: int, round_: int) -> mx.nd.NDArray:
    rows = touched(rank, round_)
    return row_sparse(random((len(rows), COLUMNS), rank, round_), rows)


def row_sparse(elements: np.ndarray, rows: np.ndarray, shape: tuple = SHAPE) -> mx.nd.NDArray:
    if not len(rows):
        return mx.nd.sparse.zeros("row_sparse", shape)
    return mx.nd.sparse.row_sparse_array((elements, rows), shape)


def summed(gradients: list) -> mx.nd.NDArray:
    """The sum of row_sparse arrays in this order, row by row."""
    total: dict = {}
    for one in gradients:
        for row, elements in zip(one.indices.asnumpy(), one.data.asnumpy()):
            total[row] = total[row] + elements if row in total else elements
    rows = sorted(total)
    return row_sparse(np.array([total[row] for row in rows]), np.array(rows), gradients[0].shape)


def of_all(store: KVStoreBase, round_: int) -> mx.nd.NDArray:
    return summed([gradient(rank, round_) for rank in range(store.num_workers)])


def full(weight: np.ndarray) -> mx.nd.NDArray:
    """A row_sparse array that has all rows."""
    return mx.nd.sparse.row_sparse_array((weight, np.arange(len(weight))), weight.shape)


def created(name: str, options: dict) -> mx.optimizer.Optimizer:
    return mx.optimizer.create(name, **options)


def sparse_gradients_of_a_dense_weight(_: KVStoreBase) -> None:
    for name, options in OPTIMIZERS:
        store = mx.kv.create("p3")
        store.set_optimizer(created(name, options))
        update = mx.optimizer.get_updater(created(name, options))
        expected, weight = mx.nd.array(random(SHAPE, 7)), mx.nd.zeros(SHAPE)
        weight.attach_grad(stype="row_sparse")
        store.broadcast("w", expected, out=weight)
        equal(weight, expected.asnumpy())
        for round_ in range(1, ROUNDS + 1):
            mine = gradient(store.rank, round_)
            update("w", of_all(store, round_), expected)
            if round_ % 2:
                store.push("w", mine, priority=-1)
                store.pull("w", out=weight, priority=-1)
            else:
                store.pushpull("w", mine, out=weight)
            equal(weight, expected.asnumpy())


def a_sparse_weight(_: KVStoreBase) -> None:
    for name, options in OPTIMIZERS:
        store = mx.kv.create("p3")
        store.set_optimizer(created(name, options))
        update = mx.optimizer.get_updater(created(name, options))
        expected = mx.nd.array(random(SHAPE, 8)) if name == "test" else full(random(SHAPE, 8))
        store.init(3, full(random(SHAPE, 8)))
        out = mx.nd.sparse.zeros("row_sparse", SHAPE)
        for round_ in range(1, ROUNDS + 1):
            store.push(3, gradient(store.rank, round_))
            update(3, of_all(store, round_), expected)
            rows = [30, 2, 5, 2, store.rank, round_]
            store.row_sparse_pull(3, out=out, row_ids=mx.nd.array(rows))
            assert out.indices.asnumpy().tolist() == sorted(set(rows))
            equal(out.data, expected.asnumpy()[sorted(set(rows))])
        everything = mx.nd.arange(ROWS, dtype="int64")
        store.row_sparse_pull(3, out=out, row_ids=everything)
        equal(out, expected.asnumpy())


def gradients_that_a_codec_rounds(_: KVStoreBase) -> None:
    store = mx.kv.create("p3")
    store.set_gradient_compression({"type": "float16"})
    store.set_optimizer(created("adam", {"learning_rate": 0.3}))
    update = mx.optimizer.get_updater(created("adam", {"learning_rate": 0.3}))
    expected = full(random(SHAPE, 8))
    store.init(3, expected)
    out = mx.nd.sparse.zeros("row_sparse", SHAPE)
    for round_ in range(1, ROUNDS + 1):
        store.push(3, gradient(store.rank, round_))
        sums = [
            summed([gradient(rank, round_) for rank in range(store.num_workers)[first:][:PER_HOST]])
            for first in range(0, store.num_workers, PER_HOST)
        ]
        halves = [
            row_sparse(
                one.data.asnumpy().astype("float16").astype("float32"), one.indices.asnumpy()
            )
            for one in sums
        ]
        update(3, summed(halves), expected)
        store.row_sparse_pull(3, out=out, row_ids=mx.nd.arange(ROWS, dtype="int64"))
        equal(out, expected.asnumpy())


def embedding_layers(_: KVStoreBase) -> None:
    """gluon's Trainer, with dense and with row_sparse weights, and Adam."""
    for block in (
        mx.gluon.nn.Embedding(ROWS, COLUMNS, sparse_grad=True),
        mx.gluon.contrib.nn.SparseEmbedding(ROWS, COLUMNS),
    ):
        sparse = block.weight._stype == "row_sparse"
        start = random(SHAPE, 5)
        block.initialize(mx.init.Constant(mx.nd.array(start)))
        trainer = mx.gluon.Trainer(block.collect_params(), "adam", kvstore="p3")
        update = mx.optimizer.get_updater(mx.optimizer.Adam(rescale_grad=1 / 6))
        expected = mx.nd.array(start)
        for round_ in range(1, ROUNDS + 1):
            with mx.autograd.record():
                loss = (block(batch(trainer_rank(), round_)) ** 2).sum()
            loss.backward()
            trainer.step(6)
            gradients = []
            for rank in range(trainer._kvstore.num_workers):
                expected.attach_grad(stype="row_sparse")
                with mx.autograd.record():
                    looked_up = mx.nd.Embedding(
                        batch(rank, round_), expected, ROWS, COLUMNS, sparse_grad=True
                    )
                    loss = (looked_up**2).sum()
                loss.backward()
                gradients.append(expected.grad.copy())
            update(0, summed(gradients), expected)
            if not sparse:
                equal(block.weight.data(), expected.asnumpy())
        equal(block.weight._reduce(), expected.asnumpy())


def the_forward_order_has_sparse_weights(_: KVStoreBase) -> None:
    network = mx.gluon.nn.Sequential()
    network.add(mx.gluon.contrib.nn.SparseEmbedding(ROWS, COLUMNS, prefix="z_"))
    network.add(mx.gluon.nn.Dense(2, in_units=COLUMNS, prefix="a_"))
    network.initialize()
    trainer = mx.gluon.Trainer(network.collect_params(), "sgd", kvstore="p3")
    for _ in range(2):
        with mx.autograd.record():
            loss = network(mx.nd.array([1, 3])).sum()
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()
    assert [trainer._params[key].name for key in trainer._kvstore.forward_order] == [
        "z_weight", "a_weight", "a_bias",
    ]  # fmt: skip


def a_module(store: KVStoreBase) -> None:
    """Module, with dense and with row_sparse weights, whose rows it pulls for the next batch."""
    ids, labels = (mx.sym.Variable(name) for name in ("ids", "label"))
    for stype in ("default", "row_sparse"):
        weight = mx.sym.Variable(f"{stype}_weight", stype=stype, shape=SHAPE)
        looked_up = mx.sym.Embedding(ids, weight, ROWS, COLUMNS, sparse_grad=True)
        loss = mx.sym.LinearRegressionOutput(looked_up, labels)
        shape = (5, COLUMNS)
        module = mx.module.Module(loss, ["ids"], ["label"], context=mx.cpu())
        module.bind([("ids", (5,))], [("label", shape)])
        start = mx.nd.array(random(SHAPE, 6))
        given = full(random(SHAPE, 6)) if stype == "row_sparse" else start
        module.init_params(arg_params={f"{stype}_weight": given})
        module.init_optimizer(kvstore="p3", optimizer="adam")
        rescale = 1.0 / shape[0] / store.num_workers
        adam = mx.optimizer.Adam(learning_rate=0.01, rescale_grad=rescale)
        update = mx.optimizer.get_updater(adam)
        expected = start.copy()
        for round_ in range(1, ROUNDS + 1):
            batches = [module_batch(rank, round_) for rank in range(store.num_workers)]
            mine = batches[store.rank]
            wanted = {f"{stype}_weight": mine.data[0]}
            module.prepare(mine, lambda _, wanted=wanted: wanted)
            module.forward_backward(mine)
            module.update()
            gradients = []
            for one in batches:
                expected.attach_grad(stype="row_sparse")
                with mx.autograd.record():
                    found = mx.nd.Embedding(one.data[0], expected, ROWS, COLUMNS, sparse_grad=True)
                    found = mx.nd.LinearRegressionOutput(found, one.label[0])
                found.backward()
                gradients.append(expected.grad.copy())
            update(0, summed(gradients), expected)
        trained, _ = module.get_params()
        equal(trained[f"{stype}_weight"], expected.asnumpy())


def module_batch(rank: int, round_: int) -> mx.io.DataBatch:
    ids = np.random.RandomState([rank, round_]).randint(0, ROWS, 5)
    return mx.io.DataBatch([mx.nd.array(ids)], [mx.nd.array(random((5, COLUMNS), rank, round_))])


def batch(rank: int, round_: int) -> mx.nd.NDArray:
    return mx.nd.array(touched(rank, round_)[:6] if (rank + round_) % 4 < 3 else [1])


def trainer_rank() -> int:
    return mx.kv.create("p3").rank


def sums_without_an_optimizer(store: KVStoreBase) -> None:
    weight = mx.nd.array(random(SHAPE, 4))
    store.init("sums", full(random(SHAPE, 4)))
    for round_ in range(1, ROUNDS + 1):
        store.push("sums", gradient(store.rank, round_))
        store.pull("sums", out=weight)
        equal(weight, of_all(store, round_).asnumpy())


def a_late_pull_gets_the_value_of_its_place(store: KVStoreBase) -> None:
    weight = mx.nd.zeros(SHAPE)
    store.init("late", full(random(SHAPE, 4)))
    mx.nd.waitall()
    for value in (random(SHAPE, 4), of_all(store, 1).asnumpy()):
        with read(weight):
            store.pull("late", out=weight)
            store.push("late", gradient(store.rank, 1))
            time.sleep(0.3)
        equal(weight, value)


def lists_of_keys_and_devices(store: KVStoreBase) -> None:
    keys, contexts = ["a", "b"], [mx.cpu(0), mx.cpu(1)]
    store.init(keys, [full(random(SHAPE, 1)), full(random(SHAPE, 2))])
    halves = [[gradient(store.rank, 1).as_in_context(one) for one in contexts] for _ in keys]
    store.push(keys, halves)
    twice = summed([gradient(rank, 1) * 2 for rank in range(store.num_workers)]).asnumpy()
    outs = [[mx.nd.sparse.zeros("row_sparse", SHAPE, ctx=one) for one in contexts] for _ in keys]
    ids = mx.nd.array([3, 9, 2])
    store.row_sparse_pull(keys, out=outs, row_ids=[ids, [ids, mx.nd.array([2])]])
    for out in (outs[0][0], outs[0][1], outs[1][0]):
        assert out.indices.asnumpy().tolist() == [2, 3, 9]
        equal(out.data, twice[[2, 3, 9]])
    equal(outs[1][1].data, twice[[2]])
    dense = [mx.nd.zeros(SHAPE, ctx=one) for one in contexts]
    for _ in range(2):
        store.pull("a", out=dense)
        equal(dense[0], twice)
        equal(dense[1], twice)
        dense[0][:] = 7  # seen: all rows come again
        store.row_sparse_pull("a", out=outs[0][0], row_ids=mx.nd.array([]))
        assert len(outs[0][0].indices) == 0


def other_dtypes_and_shapes(store: KVStoreBase) -> None:
    workers, rows = store.num_workers, np.array([1, 3])
    for dtype, shape in (("float16", (5, 2)), ("int32", (5,)), ("float64", (5, 2, 3))):
        weight = mx.nd.zeros(shape, dtype=dtype)
        weight.attach_grad(stype="row_sparse")
        store.broadcast(dtype, weight, out=weight)
        ones = np.ones((2, *shape[1:]), dtype)
        gradient = mx.nd.sparse.row_sparse_array((ones, rows), shape, dtype=dtype)
        store.pushpull(dtype, gradient, out=weight)
        expected = np.zeros(shape, dtype)
        expected[rows] = workers
        equal(weight, expected)
        out = mx.nd.sparse.zeros("row_sparse", shape)
        store.row_sparse_pull(dtype, out=out, row_ids=mx.nd.array([3, 4]))
        equal(out.data, expected[[3, 4]].astype("float32"))
        store.row_sparse_pull(dtype, out=out, row_ids=mx.nd.array([]))
        equal(out, np.zeros(shape, np.float32))


def float16_is_summed_in_float32(_: KVStoreBase) -> None:
    """With multi_precision weights are float32 on the servers, as on MXNet's."""
    several = [
        ("adam", {"multi_precision": True}, False),
        ("sgd", {"momentum": 0.9, "wd": 0.1, "multi_precision": True}, False),
        ("sgd", {"momentum": 0.9, "wd": 0.1, "multi_precision": True}, True),
        ("ftrl", {"multi_precision": True}, True),
        ("sgd", {"momentum": 0.9, "wd": 0.1}, False),
    ]
    for name, options, sparse in several:
        dtype = "float32" if "multi_precision" in options else "float16"
        store = mx.kv.create("p3")
        store.set_optimizer(created(name, options))
        update = mx.optimizer.get_updater(created(name, options))
        start = random(SHAPE, 2).astype("float16").astype("float32")
        expected = (full(start) if sparse else mx.nd.array(start)).astype(dtype)
        weight = mx.nd.array(start, dtype="float16")
        initial = full(start).astype("float16") if sparse else weight
        if not sparse:
            weight.attach_grad(stype="row_sparse")
        store.broadcast("w", initial, out=weight)
        for round_ in (1, 2, 3):
            store.push("w", gradient(store.rank, round_).astype("float16"))
            store.pull("w", out=weight)
            halves = [gradient(rank, round_).astype("float16") for rank in range(store.num_workers)]
            total = summed([half.astype("float32") for half in halves])
            update("w", total.astype(dtype), expected)
            equal(weight, expected.asnumpy().astype("float16"))


def only_touched_rows_travel(_: KVStoreBase) -> None:
    store = mx.kv.create("p3")
    store.set_optimizer(mx.optimizer.SGD())
    rows, columns, few = 4000, 64, 40
    shape, row_bytes = (rows, columns), columns * 4
    weight = mx.nd.zeros(shape)
    weight.attach_grad(stype="row_sparse")
    store.broadcast("wide", weight, out=weight)
    mx.nd.waitall()
    store._barrier()
    mine = np.arange(store.rank, rows, rows // few)
    for round_ in range(3 if PER_HOST == 1 else 0):
        before = store.stats()
        store.push("wide", row_sparse(random((few, columns), store.rank, round_), mine, shape))
        store.pull("wide", out=weight)
        weight.wait_to_read()
        after = store.stats()
        sent, received = (after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
        # Rows are less than 256 apart: what tells the number of each has one byte.
        assert few * row_bytes < sent < few * (row_bytes + 2), sent
        of_all = store.num_workers * few
        assert of_all * row_bytes < received < of_all * (row_bytes + 1), received
    after = store.stats()
    named = mx.nd.sparse.zeros("row_sparse", shape)
    store.row_sparse_pull("wide", out=named, row_ids=mx.nd.array(mine))
    named.wait_to_read()
    assert store.stats()["bytes_received"] - after["bytes_received"] == few * row_bytes
    assert store.stats()["bytes_sent"] - after["bytes_sent"] == few * 4
    equal(named.data, weight.asnumpy()[mine])


def whatever_a_script_has_written_the_next_pull_takes_away(_: KVStoreBase) -> None:
    """A single row, a single element, also by a view: all rows come then, and no rows else."""
    store = mx.kv.create("p3")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    rows, columns = 4000, 64
    shape = (rows, columns)
    weight = mx.nd.zeros(shape)
    weight.attach_grad(stype="row_sparse")
    store.broadcast("written", weight, out=weight)
    nothing = row_sparse(np.zeros((1, columns), np.float32), np.array([0]), shape)
    last, other = rows - 1, mx.nd.ones((1, columns))

    def write_element() -> None:
        weight[last, columns - 1] = 3

    def write_view() -> None:
        weight[last : last + 1][:] = other

    def write_by_operator() -> None:
        mx.nd.elemwise_add(weight, weight, out=weight)

    def read() -> None:
        assert weight.sum().asscalar() == 0

    for act, writes in [
        (write_element, True), (read, False), (write_view, True), (write_by_operator, True),
        (read, False),
    ]:  # fmt: skip
        act()
        before = store.stats()["bytes_received"]
        store.push("written", nothing)
        store.pull("written", out=weight)
        equal(weight, np.zeros(shape, np.float32))
        received = store.stats()["bytes_received"] - before
        if PER_HOST == 1:
            assert (received >= rows * columns * 4) == writes, (act.__name__, received)


def states_are_saved_in_mxnets_files_and_loaded(_: KVStoreBase) -> None:
    """Training goes on in another store as if it had not stopped."""
    adam = ("adam", {"wd": 0.01})
    for sparse, (name, options) in [(False, adam), *((True, one) for one in [*OPTIMIZERS, adam])]:
        first, second = mx.kv.create("p3"), mx.kv.create("p3")
        update = mx.optimizer.get_updater(created(name, options))
        value, weight = random(SHAPE, 3), mx.nd.zeros(SHAPE)
        expected = full(value) if sparse and name != "test" else mx.nd.array(value)
        if not sparse:
            weight.attach_grad(stype="row_sparse")
        fname = f"{sys.argv[1]}/states{first.rank}"
        for store, rounds in ((first, (1, 2)), (second, (3, 4))):
            store.set_optimizer(created(name, options))
            store.broadcast("w", full(value) if sparse else mx.nd.array(value), out=weight)
            if store is second:
                store.load_optimizer_states(fname)
            for round_ in rounds:
                store.push("w", gradient(store.rank, round_))
                store.pull("w", out=weight)
                update("w", of_all(store, round_), expected)
            equal(weight, expected.asnumpy())
            value = weight.asnumpy()
            if store is first:
                store.save_optimizer_states(fname, dump_optimizer=True)
                found = mx.optimizer.Updater(created(name, options))
                with open(fname, "rb") as file:
                    found.set_states(file.read())
                for mine, its in zip(arrays(found.states["w"]), arrays(update.states["w"])):
                    assert mine.stype == its.stype
                    equal(mine, its.asnumpy())


def arrays(state: object) -> list:
    return [state] if isinstance(state, mx.nd.NDArray) else list(state or ())


def row_numbers_that_may_mean_another_row_are_refused(store: KVStoreBase) -> None:
    """Only by the dtype, where numbers may be rounded: a rounded one looks like any other."""
    shape, rounded = (2**11 + 2, 1), 2**11 + 1
    assert mx.nd.array([rounded], dtype="float16").asnumpy() == rounded - 1
    many = full(np.zeros(shape, np.float32))
    store.init("many", many)
    out = mx.nd.sparse.zeros("row_sparse", shape)
    for dtype, numbers, told in (
        ("float16", [3], r"'many' are of float16, which numbers 2048 rows.*2050 rows.*'int64'"),
        ("int8", [3], r"of int8, which numbers 128 rows"),
        ("float32", [3, 7.5], r"'many' have 7.5 \(float32\), which is no whole number"),
        ("float64", [np.nan], r"have nan \(float64\)"),
        ("float32", [np.inf], r"to inf, and key 'many' has the rows 0 to 2049"),
        ("int64", [-1, 3], r"from -1 to 3, and key 'many' has the rows 0 to 2049"),
        ("float32", [2050], r"from 2050 to 2050"),
    ):
        with pytest.raises(KeyMismatchError, match=told):
            store.row_sparse_pull("many", out=out, row_ids=mx.nd.array(numbers, dtype=dtype))
    with pytest.raises(TypeError, match=r"'many' have a int64. Make them with mx.nd.array"):
        store.row_sparse_pull("many", out=out, row_ids=np.array([1]))
    with pytest.raises(KeyMismatchError, match="'w' are of float32, which numbers 16777216 rows"):
        named_rows("key 'w'", 2**24 + 1, mx.nd.array([1]))
    for dtype in ("float32", "float64", "int32", "int64"):
        named = named_rows("key 'w'", 2**24, mx.nd.array([2**24 - 1, 0], dtype=dtype))
        assert named.tolist() == [0, 2**24 - 1]
        numbers = mx.nd.array([rounded], dtype=dtype)
        store.row_sparse_pull("many", out=out, row_ids=numbers)
        assert out.indices.asnumpy().tolist() == [rounded]


def what_is_refused(store: KVStoreBase) -> None:
    store.init("dense", mx.nd.zeros(SHAPE))
    store.init("sparse", full(np.zeros(SHAPE, np.float32)))
    rows, out = gradient(0, 1), mx.nd.sparse.zeros("row_sparse", SHAPE)
    ids = mx.nd.array([1])
    with pytest.raises(NotSupportedError, match="attach_grad"):
        store.push("dense", rows)
    with pytest.raises(NotSupportedError, match="attach_grad"):
        store.row_sparse_pull("dense", out=out, row_ids=ids)
    with pytest.raises(NotSupportedError, match="give row_sparse gradients"):
        store.push("sparse", mx.nd.zeros(SHAPE))
    with pytest.raises(NotSupportedError, match="row_sparse_pull"):
        store.row_sparse_pull("sparse", out=mx.nd.zeros(SHAPE), row_ids=ids)
    with pytest.raises(KeyMismatchError, match="rows 0 to 36"):
        store.row_sparse_pull("sparse", out=out, row_ids=mx.nd.array([37]))
    with pytest.raises(KeyMismatchError, match="shape"):
        store.push("sparse", row_sparse(np.ones((1, 2)), np.array([0]), (ROWS, 2)))
    with pytest.raises(ValueError, match="2 row_ids"):
        store.row_sparse_pull("sparse", out=out, row_ids=[ids, ids])
    with pytest.raises(mx.MXNetError, match="'unknown'"):
        store.row_sparse_pull("unknown", out=out, row_ids=ids)
    with pytest.raises(TypeError, match="row_ids="):
        store.row_sparse_pull("sparse", out=out)
    compressed = mx.kv.create("p3")
    compressed.set_gradient_compression({"type": "2bit"})
    with pytest.raises(NotSupportedError, match="until the row is touched again"):
        compressed.init("w", full(np.zeros(SHAPE, np.float32)))


CHECKS = [
    sparse_gradients_of_a_dense_weight,
    a_sparse_weight,
    gradients_that_a_codec_rounds,
    embedding_layers,
    the_forward_order_has_sparse_weights,
    a_module,
    sums_without_an_optimizer,
    a_late_pull_gets_the_value_of_its_place,
    lists_of_keys_and_devices,
    other_dtypes_and_shapes,
    float16_is_summed_in_float32,
    only_touched_rows_travel,
    whatever_a_script_has_written_the_next_pull_takes_away,
    states_are_saved_in_mxnets_files_and_loaded,
    row_numbers_that_may_mean_another_row_are_refused,
    what_is_refused,
]

if __name__ == "__main__":
    run(CHECKS, mx.kv.create("p3"), sys.argv[1])
