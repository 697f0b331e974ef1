"""The examples run as their first lines say, and learn what they are to learn."""

from __future__ import annotations

import os
import re
import sys
from typing import Callable, Dict, List

import pytest

from tests.jobs import ROOT, environment, run
from tests.torch_environment import NEEDS_TORCH, PYTHON

Numbers = List[float]
EXAMPLES = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"numpy_front_end"}
LEARNED: Dict[str, Callable[[str], bool]] = {
    "image_classification": lambda said: numbers("accuracy", said)[0] > 0.8,
    "language_model": lambda said: (
        numbers("perplexity", said)[-1] < 0.5 * numbers("perplexity", said)[0]
        # The embedding is two thirds of the model.
        and numbers("sent", said)[0] < 0.5 * numbers("it would be", said)[0]
    ),
    "module": lambda said: numbers("accuracy", said)[0] > 0.9,
    "custom_loop": lambda said: numbers("loss", said)[-1] < 0.5,
    "torch_language_model": lambda said: numbers("loss", said)[-1] < 0.5,
    "numpy_front_end": lambda said: numbers("loss", said)[-1] < 0.5 * numbers("loss", said)[0],
}


def numbers(word: str, said: str) -> Numbers:
    """The numbers that stand behind a word."""
    return [float(found) for found in re.findall(rf"{word} ([\d.]+)\b", said)]


def test_every_example_is_run() -> None:
    assert LEARNED.keys() == EXAMPLES


@pytest.mark.parametrize(
    "name",
    [
        "image_classification",
        "language_model",
        pytest.param("torch_language_model", marks=NEEDS_TORCH),
    ]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("module", "custom_loop")],
)
def test_an_example_runs_with_two_workers_and_learns(name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    command = f"p3kv launch -n 2 -- python examples/{name}.py"
    assert command in path.read_text()
    python = str(PYTHON) if name.startswith("torch_") else sys.executable
    words = [python if word == "python" else word for word in command.split()[1:]]
    # Without what tests' jobs leave out of MXNet.
    result = run([python, "-m", "p3kv", *words], {**environment(), "PYTHONPATH": str(ROOT)}, 100)
    assert result.code == 0, result.output
    assert LEARNED[name](result.said_by("worker 0")), result.output


def test_the_front_end_for_numpy_trains_as_its_first_lines_say() -> None:
    folder = ROOT / "examples" / "numpy_front_end"
    command = "P3KV_PLUGINS=front_end p3kv launch -n 2 -- python train.py"
    assert command in (folder / "train.py").read_text()
    words = [sys.executable if word == "python" else word for word in command.split()[2:]]
    words[-1] = str(folder / words[-1])
    path = f"{ROOT}{os.pathsep}{folder}"
    settings = {**environment(), "PYTHONPATH": path, "P3KV_PLUGINS": "front_end"}
    result = run([sys.executable, "-m", "p3kv", *words], settings, 60)
    assert result.code == 0, result.output
    assert LEARNED["numpy_front_end"](result.said_by("worker 0")), result.output
