"""What documents quote is what p3kv says."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple

import pytest

from p3kv.common.combinations import TABLE, Combination
from p3kv.config import Settings
from p3kv.frontends.mxnet.front_end import MXNet
from p3kv.frontends.torch.front_end import Torch
from p3kv.tools.commands import COMMANDS
from tests.jobs import ROOT

DOCS = ROOT / "docs"
SETTINGS = DOCS / "settings.md"
TROUBLESHOOTING = DOCS / "troubleshooting.md"
MOST_CHARS = 100
"""Letters of a line of code that the site shows on 1400 pixels (`docs/_static/site.css`)."""
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


def pages() -> List[Path]:
    """All pages of the site, and README with the others beside it."""
    return [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]


def parts(page: Path) -> Tuple[str, List[str]]:
    """A page's prose, without code in its lines, and the lines of its blocks of code."""
    prose, code, fence = [], [], ""
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif line.startswith("    ") or fence:
            if "{" not in fence:  # else it is for Sphinx
                code.append(line if fence else line[4:])
        else:
            prose.append(line)
    return re.sub(r"`[^`]+`", "", "\n".join(prose)), code


def links(page: Path) -> Iterator[Tuple[Path, str]]:
    """The files to which a page links, and the place in each, which may be empty."""
    for target in re.findall(r"\]\(([^)\s]+)\)", parts(page)[0]):
        if not re.match(r"https?:", target):
            path, _, place = target.partition("#")
            yield (page.parent / path).resolve() if path else page, place


def places(page: Path) -> Set[str]:
    """The ends of links to a page's headings, after #, as GitHub and MyST make them."""
    text = page.read_text()
    for included in re.findall(r"^```{include} (.+)$", text, flags=re.M):
        text += (page.parent / included).read_text()
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def advised(entry: Combination) -> str:
    """What to do, with each framework whose words have all that is needed."""
    needed = re.findall(r"{(\w+)}", entry.instead)
    advice = {
        title: entry.advice_in(front_end.words)
        for title, front_end in (("MXNet", MXNet()), ("PyTorch", Torch()))
        if all(getattr(front_end.words, name) for name in needed)
    }
    if len({*advice.values()}) == 1 and len(advice) == 2:
        return advice["MXNet"]
    return "<br>".join(f"{title}: {text}" for title, text in advice.items())


def test_the_page_of_what_can_t_be_combined_has_the_table_that_the_code_asks() -> None:
    rows = [f"| {one.in_words} | {one.reason} | {advised(one)} |" for one in TABLE]
    page = (ROOT / "docs" / "combinations.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == rows


def test_no_link_between_pages_is_dead() -> None:
    found = [(page, *link) for page in pages() for link in links(page)]
    assert len(found) > 200
    dead = [
        (page.name, f"{target}#{place}")
        for page, target, place in found
        if not target.exists() or (place and place not in places(target))
    ]
    assert not dead


def test_the_first_page_links_to_each_page_and_the_page_of_commands_to_each_command() -> None:
    for folder in (DOCS, DOCS / "commands", DOCS / "run"):
        first = folder / "index.md"
        there = {page for page in folder.glob("*.md") if page != first}
        if folder == DOCS:
            there |= {below / "index.md" for below in (DOCS / "commands", DOCS / "run")}
        assert not there - {target for target, _ in links(first)}


def test_each_command_has_a_page_with_its_help() -> None:
    names = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    assert {page.stem for page in (DOCS / "commands").glob("*.md")} == {"index", *names}
    for name in names:
        assert f"command-output:: p3kv {name} --help" in (DOCS / f"commands/{name}.md").read_text()


def test_what_the_page_of_the_api_leaves_out_is_there() -> None:
    importlib.import_module("mxnet")  # before the store's module, which it imports by itself
    text = (DOCS / "api.md").read_text()
    left_out = re.findall(
        r":: (p3kv[\w.]+)(?:\(\))?\n   :members:\n   :exclude-members: (.+)$", text, flags=re.M
    )
    assert len(left_out) == text.count(":exclude-members:")
    for owner, names in left_out:
        module, _, name = owner.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        assert not [one for one in names.split(", ") if not hasattr(thing, one)]


def test_lines_of_code_fit_beside_the_navigation() -> None:
    lines = [(page.name, line) for page in DOCS.rglob("*.md") for line in parts(page)[1]]
    assert len(lines) > 100
    assert not [one for one in lines if len(one[1]) > MOST_CHARS]
