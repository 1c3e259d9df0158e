"""The check of graph capture, on a simulated device that captures graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import planted_faults
import pytest
import simulated_graphs
import torch
from torch import Tensor

from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import BackendImplKind, OpImpl
from vllm_fl.testing import CheckResult, Options, Status, check_implementation


@pytest.fixture(autouse=True)
def _device_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", simulated_graphs.device_module)


def check(operator: str, fn: Callable[..., Any]) -> CheckResult:
    impl = OpImpl(operator, "vendor.sample", BackendImplKind.VENDOR, fn, vendor="sample")
    options = Options(dtypes=("float32",), checks=("graph",), tokens=(1,))
    return check_implementation(impl, CATALOG[operator], planted_faults.SOUND[operator], options).checks["graph"]


@pytest.mark.parametrize("operator", planted_faults.SOUND)
def test_sound_operators_pass(operator: str) -> None:
    result = check(operator, planted_faults.SOUND[operator])
    assert (result.summary(), result.status, result.ran) == ("", Status.PASSED, 2)


def test_a_value_that_is_read_on_the_host_cannot_be_captured() -> None:
    def silu_and_mul(x: Tensor) -> Tensor:
        return planted_faults.silu_and_mul(x) if float(x[0, 0]) < 1e9 else x

    result = check("silu_and_mul", silu_and_mul)
    assert result.status is Status.FAILED
    assert result.summary() == (
        "float32, 9 tokens: not captured: RuntimeError: operation not permitted when stream is capturing"
    )


def test_a_result_that_was_computed_before_the_capture_is_stale() -> None:
    kept: dict[tuple[int, ...], Tensor] = {}

    def silu_and_mul(x: Tensor) -> Tensor:
        address = (x.data_ptr(), *x.shape)  # a cache keyed by the address, which a replay does not see change
        if address not in kept:
            kept[address] = planted_faults.silu_and_mul(x)
        return kept[address].clone()

    result = check("silu_and_mul", silu_and_mul)
    assert result.status is Status.FAILED
    assert "result 0 differs in" in result.summary()
    assert result.summary().splitlines()[0].endswith("without it")
