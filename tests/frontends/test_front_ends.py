"""Front ends: what a job asks of one, and that another one needs no change elsewhere."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Dict, Iterator, List, Optional, Tuple

import pytest

from p3kv.common import words
from p3kv.common.registry import Registry
from p3kv.common.words import Words
from p3kv.errors import ProtocolError
from p3kv.frontends import attach
from p3kv.frontends.front_end import FrontEnd
from p3kv.frontends.table import GROUP
from p3kv.server import optimizer as server_optimizer
from p3kv.server.optimizer import JobOptimizers, MakeOptimizer, Optimizer
from p3kv.wire.messages import OptimizerSettings, encode
from tests.jobs import ROOT, JobResult, environment, run, run_job

# The front end that the settings name.


class Noting(Optimizer):
    """Notes the settings that it gets."""

    def __init__(self) -> None:
        self.settings: List[Tuple[int, bytes, int]] = []

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        self.settings.append((from_step, settings, oldest_step))

    def update(self, *_: object) -> None:
        raise AssertionError("nothing is updated here")

    def export(self, *_: object) -> None:
        raise AssertionError("nothing is re-sliced here")

    def load(self, *_: object) -> None:
        raise AssertionError("nothing is re-sliced here")


class MakeNoting(MakeOptimizer):
    ready = 0

    def __call__(self) -> Optimizer:
        return Noting()

    def get_ready(self) -> None:
        type(self).ready += 1


class MakeMissing(MakeOptimizer):
    """As where the framework is not installed."""

    def __call__(self) -> Optimizer:
        self.get_ready()
        raise AssertionError("unreachable")

    def get_ready(self) -> None:
        import no_such_framework  # noqa: F401


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> JobOptimizers:
    """A server's, which has three front ends."""
    table: Registry[MakeOptimizer] = Registry(
        "front end", "every server", missing=MakeMissing, noting=MakeNoting, other=MakeNoting
    )
    monkeypatch.setattr(server_optimizer, "OPTIMIZERS", table)
    return JobOptimizers()


def settings_of(front_end: str, settings: bytes = b"") -> memoryview:
    return memoryview(encode(OptimizerSettings(front_end, settings)))


def test_settings_make_the_optimizer_of_their_front_end_once(job: JobOptimizers) -> None:
    first = job.configure(0, 1, settings_of("noting", b"one"), 0)
    assert job.configure(0, 4, settings_of("noting", b"two"), 3) is first
    assert isinstance(first, Noting)
    assert first.settings == [(1, b"one", 0), (4, b"two", 3)]


def test_an_unknown_front_end_is_told_with_those_that_there_are(job: JobOptimizers) -> None:
    with pytest.raises(ProtocolError, match=r"'nobody'.* only missing, noting, other; .*P3KV_PLUG"):
        job.configure(0, 1, settings_of("nobody"), 0)


def test_a_job_keeps_its_front_end(job: JobOptimizers) -> None:
    first = job.configure(0, 1, settings_of("noting"), 0)
    with pytest.raises(ProtocolError, match="'other', after those of 'noting'"):
        job.configure(0, 2, settings_of("other"), 0)
    assert job.configure(0, 2, settings_of("noting"), 0) is first


def test_a_framework_that_is_missing_is_told_when_it_is_needed(job: JobOptimizers) -> None:
    before = MakeNoting.ready
    job.get_ready()
    assert MakeNoting.ready == before + 2
    with pytest.raises(ImportError, match="no_such_framework"):
        job.configure(0, 1, settings_of("missing"), 0)


# Words for messages.


def test_words_of_several_front_ends_are_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_front_ends", {})
    words.add("no_such", Words(use_store="kvstore='p3'", native_store="MXNet's own store"))
    words.add("toy", Words(use_store="p3kv.toy.Store()"))
    assert words.current().use_store == "kvstore='p3' or p3kv.toy.Store()"
    assert words.current().native_store == "MXNet's own store"
    monkeypatch.setitem(sys.modules, "toy", ModuleType("toy"))
    assert words.current() == Words(use_store="p3kv.toy.Store()")


def test_mxnet_s_front_end_has_all_words() -> None:
    assert all(vars(words.current()).values())


# Another framework.


class Toy(FrontEnd):
    """The front end of a package `toy`."""

    name = "toy"
    words = Words()
    aliases: ClassVar[Dict[str, str]] = {}
    make_optimizer = MakeNoting

    def __init__(self) -> None:
        self.attached_with: List[int] = []

    def attach(self) -> None:
        self.attached_with.append(sys.modules["toy"].complete)

    def how_to_install(self) -> str:
        return "build one"

    def came_too_early(self, role: str) -> Optional[str]:
        return None


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Toy]:
    """Attached to a package that nobody has imported or written yet."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    front_end = Toy()
    attach([front_end])
    yield front_end
    sys.modules.pop("toy", None)


def test_a_front_end_is_attached_once_its_framework_is_imported(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("complete = 7\n")
    assert toy.attached_with == []
    for _ in range(2):
        importlib.import_module("toy")
        assert toy.attached_with == [7]
    attach([toy])
    assert toy.attached_with == [7, 7]


def test_a_framework_that_is_not_installed_is_told_with_its_front_end_s_words(toy: Toy) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'toy': build one$"):
        importlib.import_module("toy")


def own_framework(**settings: object) -> JobResult:
    settings = {"MXNET_UPDATE_ON_KVSTORE": 0, **settings}
    return run_job("own_framework.py", workers=2, servers=2, **settings)


def test_another_framework_trains_a_matrix_by_rows_and_is_re_sliced_without_mxnet() -> None:
    result = own_framework(P3KV_PLUGINS="own_optimizer,own_layout")
    assert result.code == 0, result.output
    for rank in range(2):
        assert f"worker {rank}: right" in result.output


def test_a_server_without_the_front_end_says_so_and_everybody_learns_it() -> None:
    result = own_framework(P3KV_PLUGINS="own_layout")
    assert result.code == 1, result.output
    last = result.output.splitlines()[-1]
    for words_ in ("worker 0", "front end 'toy'", "only mxnet", "P3KV_PLUGINS"):
        assert words_ in last, result.output


def install(folder: Path, entry: str) -> str:
    """Installs a package that has a front end; returns the path by which Python finds it."""
    info = folder / "toy_for_p3kv-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-for-p3kv\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
    return f"{folder}:{ROOT}"


def test_a_front_end_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    path = install(tmp_path, "toy = own_front_end:Toy")
    result = own_framework(P3KV_PLUGINS="own_layout", PYTHONPATH=path)
    assert result.code == 0, result.output
    for rank in range(2):
        assert f"worker {rank}: right" in result.output
    (tmp_path / "toy.py").touch()
    script = "import p3kv, toy; print(toy.attached); print(p3kv.config.current().slice_size)"
    result = run(
        [sys.executable, "-c", script], environment(PYTHONPATH=path, TOY_SLICE_SIZE=12_345), 30
    )
    assert result.output.split() == ["True", "12345"]


@pytest.mark.parametrize(
    "entry, told",
    [
        (
            "toy = no_such_module:Toy",
            "can't be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("toy = own_layout:math", "can't be loaded"),
        ("other = own_front_end:Toy", "no front end of that name"),
        ("mxnet = p3kv.frontends.mxnet.front_end:MXNet", "not the only one of mxnet"),
    ],
)
def test_an_installed_front_end_that_can_t_be_used_is_named_by_the_import(
    tmp_path: Path, entry: str, told: str
) -> None:
    path = install(tmp_path, entry)
    result = run([sys.executable, "-c", "import p3kv"], environment(PYTHONPATH=path), 30)
    last = result.output.splitlines()[-1]
    assert result.code == 1 and told in last and entry.split(" = ")[1] in last, result.output


def test_a_script_of_another_framework_that_raises_is_not_told_of_mxnet() -> None:
    script = (
        "import sys; from p3kv.processes import roles; roles._advice_for(ValueError('GPU')); "
        "print('mxnet' in sys.modules)"
    )
    result = run([sys.executable, "-c", script], environment(), 30)
    assert result.output == "False\n"


def test_mxnet_beside_a_numpy_that_it_can_t_use_is_refused_with_what_to_install() -> None:
    script = "import numpy; numpy.__version__ = '1.26.4'; import p3kv, mxnet"
    result = run([sys.executable, "-c", script], environment(), 30)
    last = result.output.splitlines()[-1]
    assert last.startswith("ImportError: mxnet can't be imported: MXNet 1.9.1 needs names")
    assert last.endswith("this is NumPy 1.26.4: pip install 'numpy<1.24'")
    put_back = script.replace("import p3kv", "numpy.bool = bool; import p3kv")
    assert run([sys.executable, "-c", put_back], environment(), 30).code == 0


_UPDATE = """
import os
{prepare}
import mxnet as mx
threads = len(os.listdir("/proc/self/task"))
weight = mx.nd.ones((1_000_000,))
mx.nd.sgd_update(weight, weight, lr=0.1, wd=0, out=weight)
weight.wait_to_read()
print(len(os.listdir("/proc/self/task")) - threads)
"""
_PREPARE = """
from p3kv.frontends.mxnet.environment import prepare_for_server_optimizer
prepare_for_server_optimizer()
"""


def test_mxnet_updates_in_one_thread_on_a_server_whatever_the_script_is_to_have() -> None:
    new_threads = {}
    for prepare in (_PREPARE, ""):
        environ = {**os.environ, "OMP_NUM_THREADS": "4", "MXNET_ENGINE_TYPE": "NaiveEngine"}
        command = [sys.executable, "-c", _UPDATE.format(prepare=prepare)]
        done = subprocess.run(
            command, env=environ, cwd=ROOT, timeout=60, capture_output=True, text=True, check=True
        )
        new_threads[prepare] = int(done.stdout)
    assert new_threads[_PREPARE] == 0 < new_threads[""], new_threads
