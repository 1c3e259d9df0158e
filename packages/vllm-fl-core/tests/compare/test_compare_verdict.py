"""What a comparison inside a model says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_fl.cli.commands.compare import show_comparison, verdict
from vllm_fl.compare import Comparison, LayerDifference, OperatorDifference, TokenDifference

WRONG = OperatorDifference(
    operator="rms_norm",
    first="reference.torch",
    second="vendor.acme",
    calls=50,
    outside=1,
    max_abs=1000.0,
    max_ulp=float("inf"),
    failed="",
    order=1,
    step=7,
    module="model.layers.1.post_attention_layernorm",
    text="result 0 is outside of the tolerance in 1 of 128 entries: 1000 at [0, 5], expected 0.3",
    dump="inputs/rms_norm.pt",
)
RIGHT = OperatorDifference("silu_and_mul", "reference.torch", "vendor.acme", 20, 0, 0.0, 0.0, "")
FAILED = OperatorDifference(
    "moe_sum", "reference.torch", "vendor.acme", 1, 0, 0.0, 0.0, "step 1, model: ValueError: no"
)


def comparison(**fields: Any) -> Comparison:
    values: dict[str, Any] = {"operators": (RIGHT,), "layers": (), "tokens": (), **fields}
    return Comparison("reference", "present", 10, requests=2, **values)


def test_nothing_differs() -> None:
    found = comparison()
    assert not found.differs
    assert found.culprit is None
    assert verdict(found) == ["No difference in 10 steps: every operator is within its tolerance, all tokens agree."]


def test_nothing_was_compared() -> None:
    found = comparison(operators=())
    assert found.is_empty
    assert found.as_dict()["is_empty"]
    assert verdict(found) == [
        "No call was compared: the policies choose the same implementations of everything that was called"
        " (`vllm-fl explain OPERATOR` shows why), or the filters leave nothing."
    ]
    assert not comparison(operators=(), at_start=("one", "other")).is_empty


def test_the_first_difference(capsys: pytest.CaptureFixture[str]) -> None:
    layers = (LayerDifference("model.layers.1", 0, 7, 373.0, 64, 128),)
    found = comparison(operators=(WRONG, RIGHT), layers=layers, tokens=(TokenDifference(0, 6, 72, 2),))
    assert found.culprit is WRONG
    assert verdict(found) == [
        "First difference: rms_norm (vendor.acme) at step 7, model.layers.1.post_attention_layernorm, rank 0: result 0"
        " is outside of the tolerance in 1 of 128 entries: 1000 at [0, 5], expected 0.3.",
        "Its inputs: vllm-fl compare --replay inputs/rms_norm.pt",
        "Request 0 parts at token 6: 72 by a, 2 by b.",
    ]
    show_comparison(found)
    out = capsys.readouterr().out
    assert "model.layers.1" in out
    assert "64 of 128" in out
    assert json.loads(json.dumps(found.as_dict(), allow_nan=True))["culprit"] == "rms_norm"


@pytest.mark.parametrize(
    ("fields", "line", "differs"),
    [
        (
            {"operators": (FAILED,)},
            "moe_sum: vendor.acme failed: step 1, model: ValueError: no",
            True,
        ),
        (
            {"at_start": ("reference.torch", "flagos.triton")},
            "Attention is reference.torch under a and flagos.triton under b: it is compared by layers and tokens"
            " alone.",
            False,
        ),
        (
            {"all_layers": False},
            "Outputs of layers are more than a rank keeps: the last steps are compared by tokens alone.",
            False,
        ),
        ({"tokens": (TokenDifference(1, 3, 5, 6),)}, "Request 1 parts at token 3: 5 by a, 6 by b.", True),
    ],
    ids=["failed", "attention", "layers", "tokens"],
)
def test_what_else_there_is_to_say(fields: dict[str, Any], line: str, differs: bool) -> None:
    found = comparison(**fields)
    assert line in verdict(found)
    assert found.differs is differs
