"""What `pip install p3kv` gets: the wheel and the source distribution, as others build them."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import venv
import zipfile
from contextlib import suppress
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Dict, Iterator, Set

import pytest

from p3kv.common.version import VERSION
from tests.jobs import ROOT, environment, run

BUILD_S = 120
NOT_SOURCES = (".*", "*.egg-info", "__pycache__", "build", "dist", "output")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Path]:
    """The source distribution and the wheel that is built from it, by their suffixes.

    From a copy, because a build writes beside the sources; and with the tools of this environment,
    so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("packages")
    shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    command = [
        sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"),
        str(folder / "sources"),
    ]  # fmt: skip
    result = run(command, environment(), BUILD_S)
    assert result.code == 0, result.output
    return {path.suffix: path for path in (folder / "dist").iterdir()}


@pytest.fixture(scope="module")
def python(built: Dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment in which the wheel is installed, and what it says it needs.

    Those packages are links to the ones that the tests have, and no others are there.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder),
        "install", "--no-index", "--no-deps", str(built[".whl"]),
    ]  # fmt: skip
    result = run(command, without_the_sources(), BUILD_S)
    assert result.code == 0, result.output
    [packages] = folder.glob("lib/python*/site-packages")
    for name in needed_packages(built[".whl"]):
        with suppress(metadata.PackageNotFoundError):  # needed on other versions of Python
            for entry in entries_of(metadata.distribution(name)):
                (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def without_the_sources() -> Dict[str, str]:
    """An environment in which Python finds p3kv only where it is installed."""
    return {k: v for k, v in environment().items() if k != "PYTHONPATH"}


def metadata_of(wheel: Path) -> Message:
    """What a wheel says of its package."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return message_from_bytes(archive.read(name))


def needed_packages(wheel: Path) -> Iterator[str]:
    """The packages that a wheel needs without any extra."""
    for needed in metadata_of(wheel).get_all("Requires-Dist", []):
        if "extra ==" not in needed:
            yield re.split(r"[^\w.-]", needed)[0]


def entries_of(package: metadata.Distribution) -> Set[Path]:
    """What an installed package has put into `site-packages`, folders as a whole."""
    files = [file for file in package.files or () if not {"..", "__pycache__"} & {*file.parts}]
    return {Path(str(package.locate_file(file.parts[0]))) for file in files}


def modules_of_the_sources() -> Set[str]:
    """All modules of the package, as paths from the repository's root."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "p3kv").rglob("*.py")}


def test_wheel_and_source_distribution_have_all_modules_and_the_licence(
    built: Dict[str, Path],
) -> None:
    needed = modules_of_the_sources() | {"p3kv/py.typed"}
    in_wheel = set(zipfile.ZipFile(built[".whl"]).namelist())
    assert needed <= in_wheel
    assert any(name.endswith("LICENSE") for name in in_wheel)
    assert not {name.partition("/")[0] for name in in_wheel} & {"tests", "experiments", "scripts"}
    with tarfile.open(built[".gz"]) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert needed | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= in_sdist
    assert not any(name.startswith("tests/") for name in in_sdist), "all or none"


def test_the_package_s_page_has_no_links_or_pictures_that_lead_nowhere(
    built: Dict[str, Path],
) -> None:
    description = str(metadata_of(built[".whl"]).get_payload())
    assert 'kvstore="p3"' in description
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []


def test_only_mxnet_s_extras_have_mxnet_s_limits(built: Dict[str, Path]) -> None:
    said = metadata_of(built[".whl"])
    assert said["Requires-Python"] == ">=3.8"
    numpy = [need for need in said.get_all("Requires-Dist", []) if need.startswith("numpy")]
    limited = {need.rpartition("extra ==")[2].strip(" '\"") for need in numpy if "<1.24" in need}
    assert limited == {"cpu", "cu101", "cu102", "cu110", "cu112", "cu117"}
    assert [need for need in numpy if "<" not in need] == ["numpy>=1.20"]


def test_a_fresh_environment_runs_the_command_and_imports_the_package(python: Path) -> None:
    roles = "p3kv.worker.worker, p3kv.server.server, p3kv.scheduler.scheduler"
    program = f"import p3kv, {roles}; print(p3kv.__version__, p3kv.__file__)"
    for command in (
        [str(python.parent / "p3kv"), "--version"],
        [str(python), "-I", "-W", "error", "-c", program],
    ):
        result = run(command, without_the_sources(), 60)
        assert result.code == 0, result.output
        assert VERSION in result.output
    assert str(python.parent.parent) in result.output
