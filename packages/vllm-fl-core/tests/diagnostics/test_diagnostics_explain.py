"""The selection trace: by the Python API, by the command, for certain arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl.catalog import CATALOG
from vllm_fl.cli import main
from vllm_fl.diagnostics import ArgumentError, explain, explain_all
from vllm_fl.diagnostics.explain import ParameterView
from vllm_fl.errors import UnknownOperatorError

pytest.importorskip("vllm_fl_reference", reason="the explanations are of the reference implementations")

Install = Callable[..., None]


def decisions(operator: str, **question: object) -> dict[str, tuple[bool, str, str]]:
    found = explain(operator, **question)  # type: ignore[arg-type]
    return {c.implementation: (c.accepted, c.reason, c.origin) for c in found.candidates}


def test_every_candidate_has_a_reason_and_the_setting_that_decided(acme: Install) -> None:
    acme(VLLM_FL_PER_OP="rms_norm=reference|vendor", VLLM_FL_DENY_VENDORS="acme")
    variable = "environment variable VLLM_FL_DENY_VENDORS"
    found = decisions("rms_norm")
    assert found["vendor.acme"] == (False, "rejected: vendor 'acme' is denied", variable)
    assert found["reference.torch"] == (
        True,
        "chosen: first by the order reference|vendor, priority 50",
        "environment variable VLLM_FL_PER_OP",
    )


def test_a_file_is_named_with_line_and_column(acme: Install, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("strict: no\nop_backends:\n  rms_norm: [reference]\n")
    acme(VLLM_FL_CONFIG="my.yaml")
    assert decisions("rms_norm")["vendor.acme"] == (
        False,
        "rejected: no token of reference matches",
        "my.yaml:3:3",
    )


@pytest.mark.parametrize(
    ("question", "chosen", "reason"),
    [
        ({}, "vendor.acme", "chosen: first by the order vendor|flagos|reference, priority 100"),
        (
            {"dtype": "fp32"},
            "reference.torch",
            "refuses these arguments: does not support float32 (only bfloat16)",
        ),
        ({"shape": ["8x4096"], "dtype": "bf16"}, "reference.torch", "refuses these arguments: only rows of 64"),
        (
            {"shape": ["x=3x5x64"], "dtype": "bfloat16"},
            "vendor.acme",
            "chosen: first by the order vendor|flagos|reference, priority 100",
        ),
    ],
    ids=["in general", "fp32", "wide", "narrow"],
)
def test_arguments(acme: Install, question: dict[str, object], chosen: str, reason: str) -> None:
    acme(VLLM_FL_PREFER="vendor")
    found = explain("silu_and_mul", **question)  # type: ignore[arg-type]
    assert found.chosen is not None
    assert found.chosen.implementation == chosen
    assert decisions("silu_and_mul", **question)["vendor.acme"][1] == reason


def test_parameters_with_what_is_allowed_and_where_they_are_set(
    acme: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text("parameters:\n  chunk_gated_delta_rule:\n    reference.torch: {chunk: 64}\n")
    acme(VLLM_FL_CONFIG="my.yaml")
    (candidate,) = (c for c in explain("chunk_gated_delta_rule").candidates if c.implementation == "reference.torch")
    assert candidate.parameters == (ParameterView("chunk", "64", "32", ("8", "16", "32", "64", "128"), "my.yaml:3:23"),)
    assert main(["explain", "chunk_gated_delta_rule"]) == 0
    assert "8, 16, 32, 64, 128" in capsys.readouterr().out
    assert main(["config", "show", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row for row in rows if row["key"] == "parameters"] == [
        {
            "key": "parameters",
            "item": "chunk_gated_delta_rule.reference.torch.chunk",
            "value": "64",
            "layer": "file",
            "origin": "my.yaml:3:23",
        }
    ]


def test_other_tensors_follow_the_sizes_of_the_first(acme: Install) -> None:
    found = explain("rms_norm", shape=["8x4096"], dtype="bf16")
    assert found.arguments == {
        "x": "[8, 4096] bfloat16 cpu",
        "residual": "None",
        "weight": "[4096] bfloat16 cpu",
        "epsilon": "1e-06",
    }


def test_a_device_that_is_not_here() -> None:
    found = explain("rms_norm", shape=["8x4096"], dtype="bf16", device="cuda")
    assert found.arguments["weight"] == "[4096] bfloat16 cuda:0"
    assert found.chosen is not None


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"shape": ["8*4096"]}, "'8*4096' is not a shape; write 8x4096, or NAME=8x4096 for another argument"),
        ({"shape": ["8x4", "9x4"]}, "'9x4' is the second shape of the first tensor; give one"),
        (
            {"shape": ["wieght=4"]},
            "rms_norm(x, residual, weight, epsilon) has no argument 'wieght'; did you mean 'weight'?",
        ),
        (
            {"shape": ["5"]},
            "the first tensor of rms_norm(x, residual, weight, epsilon) has 2 or 3 dimensions, [5] has",
        ),
        ({"dtype": "bf61"}, "'bf61' is not a dtype (bf16, bfloat16, f16, f32, float, float16, float32, "),
        ({"device": "cuda:x"}, "'cuda:x' is not a device of torch"),
        ({"device": "cdua"}, "'cdua' is not a device of torch; did you mean 'cuda'?"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(next(iter(value.values()))),
)
def test_wrong_questions(question: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        explain("rms_norm", **question)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_unknown_operator() -> None:
    with pytest.raises(UnknownOperatorError, match="did you mean 'rms_norm'"):
        explain("rmsnorm")


def test_all_operators() -> None:
    found = explain_all()
    assert [explanation.operator for explanation in found] == sorted(CATALOG)
    assert all(explanation.chosen is not None for explanation in found)


def test_command(acme: Install, capsys: pytest.CaptureFixture[str]) -> None:
    acme(VLLM_FL_PREFER="vendor")
    assert main(["explain", "silu_and_mul", "--dtype", "bf16", "--shape", "4x128"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("silu_and_mul(x): reference.torch\n")
    assert "vLLM calls it from SiluAndMul." in out
    assert "  x: [4, 128] bfloat16 cpu\n" in out
    lines = [line for line in out.splitlines() if "reference.torch " in line or "vendor.acme " in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert rows[-1][:5] == ["-", "vendor.acme", "vendor", "100", "refuses these arguments: only rows of 64"]
    assert rows[0][:4] == ["1", "reference.torch", "reference", "50"]
    assert main(["explain", "silu_and_mul", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"] == "vendor.acme"
    assert document["candidates"][0]["owner"] == "env 'acme_operators' of module acme_operators"


def test_command_for_all_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--all"]) == 0
    out = capsys.readouterr().out
    assert all(f"│ {name} " in out for name in CATALOG)
    assert main(["explain", "--all", "--json"]) == 0
    assert [document["operator"] for document in json.loads(capsys.readouterr().out)] == sorted(CATALOG)


def test_nothing_is_left(acme: Install, capsys: pytest.CaptureFixture[str]) -> None:
    acme(VLLM_FL_PER_OP="rms_norm=vendor:acme", VLLM_FL_DENY_VENDORS="acme")
    assert main(["explain", "rms_norm"]) == 1
    assert "rms_norm(x, residual, weight, epsilon): no implementation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Error: Name one operator, or give --all."),
        (["rms_norm", "--all"], "Error: Name one operator, or give --all."),
        (["--all", "--dtype", "bf16"], "Error: --shape, --dtype and --device are for one operator of this process."),
        (["rms_norm", "--live", "nowhere"], "Error: There is no directory nowhere."),
    ],
)
def test_wrong_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) in (2, 3)
    assert capsys.readouterr().err.splitlines()[0] == message
