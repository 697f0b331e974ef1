"""Python runs this at its start, in every process of tests' jobs: imports of MXNet and of what
torch's optimizers need take half their time. What is used is what it is without this.

MXNet generates and compiles 2,556 functions at its import, of which a job calls a few; here each is
compiled at its first call. MXNet also imports packages, where they are, for downloads and for tests
of its own. torch's first optimizer imports its compiler; here only scripts that compile do.

Where p3kv is not there to train, a script's process group lives 0.2 s longer. Its thread needs the
GIL to let the last reduction go: with torch 2.13, as Python 3.11 ends or a model is freed, both may
wait for each other for good, or the process aborts.
"""

import re
import sys
import time
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_NO_COMPILER = Path(__file__).parents[2] / "p3kv/frontends/torch/optimizers/no_compiler.py"
_LETS_GO_S = 0.2
_NAME = re.compile(r"\s*def (\w+)\(")


def _compile_when_called(source: str, _: None, made: dict) -> None:
    """What these modules call in the place of `exec`."""
    module = sys._getframe(1).f_globals
    found = _NAME.match(source)
    assert found is not None, source
    name = found[1]
    compiled = []

    def function(*arguments, **further):  # type: ignore[no-untyped-def]
        if not compiled:
            namespace: dict = {}
            exec(source, module, namespace)
            compiled.append(namespace[name])
        return compiled[0](*arguments, **further)

    made[name] = function


class _GeneratingLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.exec = _compile_when_called  # type: ignore[attr-defined]
        super().exec_module(module)


class _GroupLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        destroy = module.destroy_process_group

        def destroy_process_group(*arguments, **further):  # type: ignore[no-untyped-def]
            if "p3kv" not in sys.modules:
                time.sleep(_LETS_GO_S)
            destroy(*arguments, **further)

        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


class _Imported(Loader):
    """Of a module that its package has imported on its way."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


_LOADERS = {
    "mxnet.symbol.register": _GeneratingLoader,
    "mxnet.ndarray.register": _GeneratingLoader,
    "torch.distributed.distributed_c10d": _GroupLoader,
}


class _Lean:
    @staticmethod
    def find_spec(name: str, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torch":
            spec = spec_from_file_location("no_compiler", _NO_COMPILER)
            assert spec is not None and spec.loader is not None
            no_compiler = module_from_spec(spec)  # p3kv, as whose part it is, may not be imported
            spec.loader.exec_module(no_compiler)
            no_compiler.leave_out()
        elif name.startswith("torch._dynamo.") and name in sys.modules:  # imported with it
            return ModuleSpec(name, _Imported())
        elif name == "mxnet":
            sys.modules.setdefault("requests", ModuleType("requests"))
            sys.modules.update(dict.fromkeys(("scipy", "sklearn")))  # can't be imported
        elif name in _LOADERS:
            spec = PathFinder.find_spec(name, path)
            spec.loader = _LOADERS[name](name, spec.origin)
            return spec
        return None


sys.meta_path.insert(0, _Lean)
