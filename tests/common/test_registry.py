"""Classes by name, and the texts by which settings choose one with parameters."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from p3kv.common.registry import Choice, Registry, choice_of
from p3kv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name", "parameters"),
    [
        ("topk", "topk", {}),
        ("topk:share=0.01", "topk", {"share": 0.01}),
        (" topk : share = 1e-3 , exact = True ", "topk", {"share": 0.001, "exact": True}),
        ("local:steps=50,kind=x,off=false", "local", {"steps": 50, "kind": "x", "off": False}),
    ],
)
def test_a_text_chooses_a_class_with_parameters(
    text: str, name: str, parameters: Dict[str, Any]
) -> None:
    found = choice_of(text, "P3KV_X")
    assert found == Choice(name, parameters)
    assert [type(found.parameters[key]) for key in parameters] == [*map(type, parameters.values())]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("topk:", ""),
        ("topk:0.01", "0.01"),
        ("topk:share=", "share="),
        ("topk:=1", "=1"),
        ("topk:share=1,share=2", "share=2"),
        ("topk:share=1,", ""),
        ("own.module:Class", "Class"),
    ],
)
def test_a_text_of_another_form_is_told_with_its_variable(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choice_of(text, "P3KV_X")
    assert f"P3KV_X is {text!r}, in which {part!r} is not a parameter" in str(caught.value)


@pytest.mark.parametrize("name", ["", "x" * 65, "one:two"])
def test_a_name_that_no_setting_could_choose_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has from 1 to 64 letters, and no colon"):
        Registry("thing", "everybody").register(name, dict)
