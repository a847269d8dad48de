"""The parameter policy: the documented table is the one that works, and what each cell does."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway import policy
from gateway.errors import UnsupportedParameter
from gateway.policy import Cell

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "parameters.md"


def test_it_works() -> None:
    cells = policy.cells_of("qwen3-32b", {})
    sent = {"model": "qwen3-32b", "temperature": 0.5, "stop": ["x"], "priority": 1, "unheard": {}}
    assert policy.apply(sent, cells) == {
        "model": "qwen3-32b",
        "temperature": 0.5,
        "unheard": {},
    }


def test_the_document_has_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \|", DOCUMENT.read_text(), re.M)
    assert [(name, Cell(status, action)) for name, status, action in rows] == list(
        policy.DEFAULTS.items()
    )


def test_the_document_names_what_is_fixed() -> None:
    text = DOCUMENT.read_text()
    sentence = text[text.index("An operator switches") : text.index("```toml")]
    assert set(re.findall(r"`(\w+)`", sentence)) == policy.FIXED


def test_every_action_is_one_of_three() -> None:
    assert {cell.action for cell in policy.DEFAULTS.values()} <= set(policy.ACTIONS)
    assert set(policy.DEFAULTS) >= policy.FIXED


@pytest.mark.parametrize("value", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_tool_choice_is_rejected(value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as refusal:
        policy.apply({"tool_choice": value}, policy.cells_of("qwen3-32b", {}))
    assert refusal.value.param == "tool_choice"
    assert "'auto'" in refusal.value.message


@pytest.mark.parametrize("value", ["auto", "none", None])
def test_unforced_tool_choice_passes(value: Any) -> None:
    sent = {"tool_choice": value}
    assert policy.apply(sent, policy.cells_of("qwen3-32b", {})) == sent


def test_ignore_eos_is_rejected_on_gpt_oss_only() -> None:
    sent = {"ignore_eos": True}
    assert policy.apply(sent, policy.cells_of("qwen3-32b", {})) == sent
    with pytest.raises(UnsupportedParameter) as refusal:
        policy.apply(sent, policy.cells_of("gpt-oss-120b", {}))
    assert refusal.value.param == "ignore_eos"


@pytest.mark.parametrize("value", [False, None, 0, 1, "true"])
def test_the_ignore_eos_cell_means_true(value: Any) -> None:
    sent = {"ignore_eos": value}
    assert policy.apply(sent, policy.cells_of("gpt-oss-120b", {})) == sent


def test_an_override_switches_the_action_and_keeps_the_status() -> None:
    cells = policy.cells_of("gpt-oss-20b", {"stop": "forward", "ignore_eos": "forward"})
    assert cells["stop"] == Cell("ignored", "forward")
    sent = {"stop": "x", "ignore_eos": True}
    assert policy.apply(sent, cells) == sent


def test_an_override_may_name_any_parameter() -> None:
    cells = policy.cells_of("qwen3-32b", {"seed": "reject", "logit_bias": "drop"})
    assert policy.apply({"logit_bias": {"1": 2}}, cells) == {}
    with pytest.raises(UnsupportedParameter, match="'seed' is not supported on this model"):
        policy.apply({"seed": 1}, cells)


@pytest.mark.parametrize("action", policy.ACTIONS)
def test_a_null_is_absent(action: str) -> None:
    cells = policy.cells_of("qwen3-32b", {"seed": action})
    assert policy.apply({"seed": None}, cells) == {"seed": None}


def test_models_do_not_share_their_cells() -> None:
    policy.cells_of("gpt-oss-120b", {"stop": "forward"})
    assert policy.DEFAULTS["stop"].action == "drop"
    assert policy.cells_of("qwen3-32b", {})["ignore_eos"].action == "forward"
