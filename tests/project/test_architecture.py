"""Imports run one way only, frameworks stop at their front end, settings are read in one place."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Set

import pytest

ROOT = Path(__file__).parent.parent.parent

GROUND = {"p3kv.common", "p3kv.config", "p3kv.errors"}
MIDDLE = {
    "p3kv.checkpoints", "p3kv.wire", "p3kv.slicing", "p3kv.codecs", "p3kv.consistency",
    "p3kv.transport",
}  # fmt: skip
MAY_IMPORT: Dict[str, Set[str]] = {
    "p3kv.errors": set(),
    "p3kv.common": {"p3kv.errors"},
    "p3kv.config": {"p3kv.common", "p3kv.errors"},
    "p3kv.processes": set(),
    "p3kv.tools": set(),
    "p3kv.slicing": GROUND,
    "p3kv.codecs": GROUND,
    "p3kv.consistency": GROUND,
    "p3kv.report.forecast": {"p3kv.slicing"},
    "p3kv.transport": GROUND,
    "p3kv.wire": GROUND | {"p3kv.transport"},
    "p3kv.checkpoints": GROUND | {"p3kv.wire.messages"},
    "p3kv.report": GROUND | {"p3kv.report.forecast", "p3kv.wire.messages"},
    "p3kv.worker": GROUND | MIDDLE | {"p3kv.report.forecast", "p3kv.report"},
    "p3kv.server": GROUND | MIDDLE | {"p3kv.report"},
    # No sockets, no queues, no files.
    "p3kv.server.engine": GROUND
    | {"p3kv.codecs", "p3kv.consistency", "p3kv.slicing", "p3kv.server.optimizer"}
    | {"p3kv.wire.fields", "p3kv.wire.header", "p3kv.wire.messages", "p3kv.wire.rows"}
    | {"p3kv.wire.slice_sizes"},
    "p3kv.scheduler": GROUND | MIDDLE,
    "p3kv.tools.top": GROUND | {"p3kv.report", "p3kv.wire"},
    "p3kv.processes.companions": GROUND | {"p3kv.wire.address"},
    "p3kv.processes.meeting": GROUND | {"p3kv.frontends", "p3kv.wire.address"},
    "p3kv.processes.roles": GROUND
    | {"p3kv.processes.companions", "p3kv.processes.meeting", "p3kv.frontends", "p3kv.worker"},
    # What a store hands over to a server is declared in `p3kv.server.optimizer`.
    "p3kv.store": GROUND
    | {"p3kv.checkpoints", "p3kv.codecs", "p3kv.consistency"}
    | {"p3kv.wire.header", "p3kv.wire.messages", "p3kv.wire.states", "p3kv.worker"}
    | {"p3kv.server.optimizer", "p3kv.server.outer"},
    "p3kv.frontends": GROUND
    | {"p3kv.wire.header", "p3kv.wire.messages", "p3kv.worker", "p3kv.store"}
    | {"p3kv.consistency", "p3kv.report.forecast", "p3kv.server.optimizer"},
    "p3kv.processes.launcher": GROUND | {"p3kv.wire.launcher_link"},
    "p3kv.tools.timeline": GROUND,
    "p3kv.tools.plan": GROUND | {"p3kv.report"},
    "p3kv.tools.pictures": GROUND | {"p3kv.report", "p3kv.tools.plan", "p3kv.tools.timeline"},
    "p3kv.tools.trials": GROUND | {"p3kv.codecs", "p3kv.processes.launcher", "p3kv.report"},
    "p3kv.tools.compare": GROUND | {"p3kv.report", "p3kv.tools.plan", "p3kv.tools.trials"},
    "p3kv.tools.tune": GROUND | {"p3kv.report", "p3kv.tools.trials"},
    "p3kv.tools.doctor": GROUND | MIDDLE | {"p3kv.frontends"},
    "p3kv.tools.doctor_agent": GROUND | {"p3kv.tools.doctor"},
    "p3kv.tools.doctor_hosts": GROUND
    | {"p3kv.processes.launcher", "p3kv.report", "p3kv.tools.doctor", "p3kv.tools.doctor_agent"},
    "p3kv.tools.commands": GROUND
    | {"p3kv.frontends", "p3kv.processes.launcher", "p3kv.report.forecast", "p3kv.transport"}
    | {f"p3kv.tools.{tool}" for tool in ("compare", "doctor", "doctor_hosts", "pictures", "plan")}
    | {f"p3kv.tools.{tool}" for tool in ("timeline", "top", "trials", "tune")},
    "p3kv.tools.cli": GROUND | {"p3kv.tools.commands"},
    "p3kv": GROUND | {"p3kv.processes.roles", "p3kv.frontends"},
    "p3kv.torch": {"p3kv.frontends"},
    "p3kv.ddp": GROUND | {"p3kv.tools.commands.run"},
    "p3kv.__main__": {"p3kv.tools.cli"},
}
"""Each room, and what its modules may import beside each other, also inside functions."""

COMPOSITION_ROOT = "p3kv.processes.roles"
"""Puts the roles together, and may import any of them inside a function, when it is known which
one this process is."""

FOLDERS_MAY_IMPORT: Dict[str, Set[str]] = {
    "experiments.as_it_is": {"experiments.cluster", "p3kv.report.forecast"},
    "experiments.cluster": set(),
    "experiments.models": {"p3kv.report.forecast", "p3kv.frontends.mxnet"},
    "experiments.emulation": {
        "experiments.models",
        "p3kv.report.forecast",
        "p3kv.slicing",
        "p3kv.frontends.mxnet",
        "p3kv.torch",
    },
    "experiments.training": {"experiments.emulation", "p3kv.torch"},
    "experiments.campaign": {
        "experiments.cluster",
        "experiments.models",
        "experiments.emulation",
        "experiments.training",
        "p3kv.report.forecast",
        "p3kv.frontends.mxnet",
        "p3kv.common.registry",
        "p3kv.common.version",
        "p3kv.codecs",
        "p3kv.slicing",
    },
    "experiments.drawing": {
        "experiments.cluster",
        "experiments.models",
        "experiments.emulation",
        "experiments.training",
        "experiments.campaign",
        "p3kv.report.forecast",
        "p3kv.tools.timeline",
    },
    "experiments.dualpipe": {
        "experiments.models",
        "experiments.campaign",
        "experiments.drawing",
        "p3kv.report.forecast",
    },
    "experiments.parallax": {
        "experiments.cluster",
        "experiments.models",
        "experiments.emulation",
        "experiments.training",
        "experiments.campaign",
        "experiments.drawing",
        "p3kv.config",
        "p3kv.tools.trials",
        "p3kv.tools.tune",
    },
    "experiments.spectrain": {
        "experiments.training",
        "experiments.campaign",
        "experiments.drawing",
    },
    "experiments.thesis": {
        "experiments.cluster",
        "experiments.models",
        "experiments.emulation",
        "experiments.training",
        "experiments.campaign",
        "experiments.drawing",
    },
}
"""Each folder of experiments, and what its modules may import beside each other. What is in none
is a figure: it may import all of them, and no other figure."""

BUDGETS = {
    # room: (lines, files)
    "checkpoints": (1190, 6),
    "codecs": (1155, 6),
    "common": (1411, 13),
    "config": (1235, 7),
    "consistency": (515, 4),
    "frontends/torch": (11572, 53),
    "processes": (2392, 12),
    "report": (1340, 9),
    "scheduler": (2350, 9),
    "server": (5659, 20),
    "slicing": (644, 4),
    "tools": (4090, 22),
    "transport": (599, 4),
    "wire": (5310, 25),
    "worker": (8346, 30),
}
"""The most that each room may have. A feature changes the object that decides, and is not one more
beside it: raise a number only together with a reason."""

OURS = ("p3kv", "experiments", "scripts", "tests")

FRAMEWORKS = {"mxnet": "p3kv.frontends.mxnet", "torch": "p3kv.frontends.torch"}
HANDED_ON = {"p3kv.torch", "p3kv.torch.ddp"}
"""Modules that only hand on a front end's names, and need its framework."""
BEFORE_THE_FRAMEWORK = ("front_end", "environment")
"""Modules of a front end that every process imports."""
KNOW_NO_FRAMEWORK = (
    "p3kv.checkpoints", "p3kv.common", "p3kv.config", "p3kv.consistency", "p3kv.frontends.attach",
    "p3kv.frontends.front_end", "p3kv.processes", "p3kv.report", "p3kv.scheduler", "p3kv.server",
    "p3kv.slicing", "p3kv.store", "p3kv.tools.compare", "p3kv.tools.plan", "p3kv.tools.trials",
    "p3kv.tools.tune",
    "p3kv.transport", "p3kv.wire", "p3kv.worker",
)  # fmt: skip
WORDS_OF_FRAMEWORKS = re.compile(
    r"mxnet|gluon|kvstore=|torch(?!run|elastic)|\bmx\.|\bkv\.", re.IGNORECASE
)
"""torchrun starts scripts of any framework."""
HANDS_ON_THE_ENVIRONMENT = {
    "p3kv.processes.launcher.agents", "p3kv.processes.launcher.guardian",
    "p3kv.processes.launcher.launch",
}  # fmt: skip
"""Give their own environment to the processes they start, whole, and read nothing in it."""


class Import(NamedTuple):
    """What a module imports, and whether only when a function is called."""

    what: str
    in_function: bool


def modules(package: str) -> Dict[str, Path]:
    """All modules of the package by name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules("p3kv")
EXPERIMENTS = modules("experiments")
ALL = {**MODULES, **EXPERIMENTS}


def imports(module: str) -> Iterator[Import]:
    """Everything that a module imports, as full names of modules."""
    yield from _imports(ast.parse(ALL[module].read_text()), False)


def _imports(node: ast.AST, in_function: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, in_function)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            # `from p3kv import config` imports a module, `from p3kv.config import Settings` not.
            full = f"{node.module}.{alias.name}"
            yield Import(full if full in ALL else str(node.module), in_function)
    within = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, in_function or within)


def is_in(module: str, room: str) -> bool:
    return module == room or (room != "p3kv" and module.startswith(room + "."))


def room_of(module: str) -> str:
    rooms = [room for room in MAY_IMPORT if is_in(module, room)]
    assert rooms, f"{module} is in no room; say in MAY_IMPORT what it may import"
    return max(rooms, key=len)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards_only(module: str) -> None:
    room = room_of(module)
    for imported in imports(module):
        if imported.what.partition(".")[0] not in OURS:
            continue
        if module == COMPOSITION_ROOT and imported.in_function:
            continue
        allowed = [room, *MAY_IMPORT[room]]
        assert any(is_in(imported.what, other) for other in allowed), (
            f"{module} imports {imported.what}, which is not below it"
        )


@pytest.mark.parametrize("module", EXPERIMENTS)
def test_experiments_import_downwards_only(module: str) -> None:
    folder = next((folder for folder in FOLDERS_MAY_IMPORT if is_in(module, folder)), None)
    allowed = [folder, *FOLDERS_MAY_IMPORT[folder]] if folder else list(FOLDERS_MAY_IMPORT)
    for imported in imports(module):
        if imported.what.partition(".")[0] in OURS:
            assert any(is_in(imported.what, other) for other in allowed), (
                f"{module} imports {imported.what}, which is not below it"
            )


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {i.what for i in imports(module) if i.what in ALL and not i.in_function}
        for module in ALL
    }
    done: Set[str] = set()

    def visit(module: str, above: List[str]) -> None:
        assert module not in above, " imports ".join([*above, module])
        if module not in done:
            for imported in sorted(graph[module]):
                # A package hands on names of its own modules; they do not need it for that.
                if not module.startswith(imported + "."):
                    visit(imported, [*above, module])
            done.add(module)

    for module in graph:
        visit(module, [])


@pytest.mark.parametrize("module", MODULES)
def test_a_framework_is_imported_by_its_front_end_alone(module: str) -> None:
    for imported in imports(module):
        front_end = FRAMEWORKS.get(imported.what.partition(".")[0])
        assert front_end is None or is_in(module, front_end), f"{module} imports {imported.what}"


def test_importing_anything_but_a_front_end_imports_no_framework() -> None:
    front_ends = FRAMEWORKS.values()
    before = {f"{f}.{name}" for f in front_ends for name in BEFORE_THE_FRAMEWORK} | {*front_ends}
    names = [
        m
        for m in MODULES
        if m in before or not (m in HANDED_ON or any(is_in(m, f) for f in front_ends))
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        f"    found = [f for f in {list(FRAMEWORKS)} if f in sys.modules]\n"
        "    assert not found, (name, found)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "P3KV_"))}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        text=True,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "module", [m for m in MODULES if any(is_in(m, room) for room in KNOW_NO_FRAMEWORK)]
)
def test_what_every_framework_uses_names_none_in_code_messages_or_comments(module: str) -> None:
    for number, line in enumerate(MODULES[module].read_text().splitlines(), 1):
        found = WORDS_OF_FRAMEWORKS.search(line)
        assert found is None, f"{module}, line {number}: a front end's word: {found}"


@pytest.mark.parametrize("module", MODULES)
def test_the_environment_is_read_in_config_and_by_each_front_end_in_one_module(module: str) -> None:
    if is_in(module, "p3kv.config") or module in HANDS_ON_THE_ENVIRONMENT:
        return
    if module in (f"{front_end}.environment" for front_end in FRAMEWORKS.values()):
        return
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else None
        name = node.name if isinstance(node, ast.alias) else name
        assert name not in ("environ", "environb", "getenv", "putenv"), (
            f"{module}, line {getattr(node, 'lineno', '?')}: settings belong into p3kv.config"
        )


def test_all_of_p3kv_is_looked_at() -> None:
    assert {"p3kv", "p3kv.wire.framing", "p3kv.frontends.mxnet.store"} <= set(MODULES)
    for room in KNOW_NO_FRAMEWORK:
        assert any(is_in(module, room) for module in MODULES), room
    for front_end in FRAMEWORKS.values():
        assert f"{front_end}.front_end" in MODULES
    stored = {i for module in MODULES for i in imports(module)}
    assert Import("p3kv.server.server", True) in stored
    assert Import("mxnet", False) in stored


def test_all_folders_of_experiments_are_looked_at() -> None:
    figures = {module for module in EXPERIMENTS if module.count(".") == 1} - set(FOLDERS_MAY_IMPORT)
    assert {"experiments.figure4", "experiments.overhead"} <= figures
    for folder in FOLDERS_MAY_IMPORT:
        assert sum(is_in(module, folder) for module in EXPERIMENTS) > 1, folder
    assert not [
        module
        for module in EXPERIMENTS
        if module.count(".") > 1 and not any(is_in(module, f) for f in FOLDERS_MAY_IMPORT)
    ]


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room: str) -> None:
    files = list((ROOT / "p3kv" / room).rglob("*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    most_lines, most_files = BUDGETS[room]
    assert lines <= most_lines, f"p3kv/{room} has {lines} lines, and {most_lines} at most are right"
    assert len(files) <= most_files, f"p3kv/{room} has {len(files)} files, at most {most_files}"
