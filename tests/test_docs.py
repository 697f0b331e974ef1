"""What documents quote is what p3kv says."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from typing import Any, Dict, Iterator, List

import pytest

from p3kv.config import Settings
from tests.jobs import ROOT

SETTINGS = ROOT / "docs" / "settings.md"
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


def defaults() -> Dict[str, str]:
    """By variable, the default that the page of settings gives; a row may have several."""
    found = {}
    for line in SETTINGS.read_text().splitlines():
        if line.startswith("| `P3KV_"):
            names, values = line.split(" | ")[:2]
            variables = re.findall(r"`(P3KV_\w+)`", names)
            found.update(zip(variables, values.split(", ")))
    return found


def in_words(default: Any) -> str:
    """A default as the page has it; none is told in words of its own, or not at all."""
    return f"{default:g}" if isinstance(default, (bool, int, float)) else default or ""


def test_the_page_of_settings_has_each_setting_with_its_default() -> None:
    told = defaults()
    settings = {f"P3KV_{one.name.upper()}": one.default for one in fields(Settings)}
    assert not set(settings) - set(told)
    known = {name: in_words(value) for name, value in settings.items() if value is not None}
    assert {name: told[name].strip("| ") for name in known} == known
