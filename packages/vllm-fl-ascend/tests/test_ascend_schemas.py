"""The schemas that are called are torch_npu's, and are compared with what is registered before anything is called."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fl_ascend.schemas import SCHEMAS, available

VERSIONS = ("2.11.0.post3", "2.12.0.post3", "2.13.0", "2.14.0")


def test_they_are_those_of_the_wheels(simulated_npu: Any) -> None:
    rows = simulated_npu.simulated_registry.rows()
    assert {f"{row.namespace}::{row.schema}" for row in rows} == set(SCHEMAS.values())
    for row in rows:
        confirmed = VERSIONS if row.namespace == "npu" else VERSIONS[:2]
        assert row.versions == confirmed, row.name
        assert set(VERSIONS) - {"-", *row.versions, *row.unconfirmed} == set(), row.name


@pytest.mark.parametrize("name", SCHEMAS)
def test_available(simulated_npu: Any, name: str) -> None:
    answer = available(name)
    assert answer.ok, answer.reason


def test_not_loaded() -> None:
    assert "torch_npu" not in sys.modules
    assert available("npu::npu_swiglu").reason == "torch_npu is not loaded; the Ascend platform loads it"


def test_no_device(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: False))
    assert available("npu::npu_swiglu").reason == "torch_npu finds no NPU (npu-smi info shows them)"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("npu::npu_swiglu_3", "torch_npu 2.13.0+simulated does not have the operator npu::npu_swiglu_3"),
        (
            "atb::_npu_rotate",
            "torch_npu 2.13.0+simulated does not have the operator atb::_npu_rotate; the operators of atb need the "
            "NNAL package, and its set_env.sh",
        ),
    ],
)
def test_missing(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    monkeypatch.setitem(SCHEMAS, name, f"{name}(Tensor x) -> Tensor")
    assert available("npu::npu_swiglu", name).reason == reason


@pytest.mark.parametrize(
    ("ours", "fits"),
    [
        ("npu::npu_swiglu(Tensor input) -> Tensor", True),
        ("npu::npu_swiglu(Tensor input, int dim=-1, bool gate_first=True) -> Tensor", False),
        ("npu::npu_swiglu(Tensor x, int dim=-1) -> Tensor", False),
        ("npu::npu_swiglu(Tensor input, int dim=-1) -> (Tensor, Tensor)", False),
    ],
    ids=["an argument was added", "an argument has gone", "an argument has another name", "other results"],
)
def test_another_schema(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch, ours: str, fits: bool) -> None:
    monkeypatch.setitem(SCHEMAS, "npu::npu_swiglu", ours)
    reason = (
        ""
        if fits
        else (
            "torch_npu 2.13.0+simulated has npu::npu_swiglu with another schema, "
            "npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor"
        )
    )
    assert available("npu::npu_swiglu").reason == reason


@pytest.mark.parametrize("name", ["atb::_npu_rotary_embedding", "atb::_npu_reshape_and_cache"])
def test_atb_with_another_schema_is_not_called(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Their schema is not confirmed for torch_npu 2.13 and 2.14."""
    from vllm_fl_ascend.ops import OPERATORS

    monkeypatch.setitem(SCHEMAS, name, SCHEMAS[name].replace(") -> ()", ", int mode) -> ()"))
    (fn,) = [o.fn for o in OPERATORS if o.impl_id == "vendor.ascend.atb" and f"_npu_{o.fn.__name__}" in name]
    answer = fn._is_available()
    assert not answer.ok
    assert f"has {name} with another schema" in answer.reason
