"""Variables of the environment that a job's processes get on other hosts."""

from __future__ import annotations

from typing import Dict, List, Mapping

_PREFIXES: List[str] = [
    "P3KV_", "DMLC_", "PS_", "PYTHON", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "CUDA_",
]  # fmt: skip
_NAMES = (
    "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
)  # fmt: skip
_OF_ONE_HOST = ("DMLC_NODE_HOST",)
"""They say where one process listens, and would be wrong for the others."""


def add_prefix(prefix: str) -> None:
    """Has a framework's own variables travel, too."""
    _PREFIXES.append(prefix)


def forwarded(environ: Mapping[str, str]) -> Dict[str, str]:
    """The variables that a process needs on another host: settings, and where its programs are."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(tuple(_PREFIXES))) and name not in _OF_ONE_HOST
    }
