"""What documents quote is what p3kv says."""

from __future__ import annotations

import ast
import re
from typing import Iterator, List

import pytest

from tests.jobs import ROOT

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
OTHERS = ("No module named 'mxnet'", "requires a different Python", "has no attribute")
"""Beginnings of what Python and pip say."""


def symptoms() -> List[str]:
    """What users see, by the first column of each table: pieces of messages between '...'."""
    found = []
    for line in TROUBLESHOOTING.read_text().splitlines():
        if line.startswith("| `"):
            for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                found += [piece.strip() for piece in quoted.split("...")]
    return [piece for piece in found if len(piece) > 3 and not any(o in piece for o in OTHERS)]


def said(tree: ast.AST) -> Iterator[str]:
    """The texts in a module, with '\0' for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                one.value if isinstance(one, ast.Constant) else "\0" for one in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def messages() -> str:
    """All texts in the package's code."""
    modules = (ROOT / "p3kv").rglob("*.py")
    return "\n".join(text for path in modules for text in said(ast.parse(path.read_text())))


def test_the_symptoms_in_troubleshooting_are_messages_of_the_code(messages: str) -> None:
    pieces = symptoms()
    assert len(pieces) > 40
    assert not [piece for piece in pieces if piece not in messages]
