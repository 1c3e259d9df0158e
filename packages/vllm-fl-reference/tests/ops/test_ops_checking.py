"""The check that the other tests rest on finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_checking import check, copy
from torch import Tensor

import vllm_fl_reference.ops as ops
from vllm_fl.catalog import CATALOG, Case, InputMaker

X = InputMaker(torch.float32).normal(6, 8)


def _slightly_off(x: Tensor) -> Tensor:
    out = ops.silu_and_mul(x)
    out[2, 1] += 1e-3
    return out


def _writes_its_input(x: Tensor) -> Tensor:
    out = ops.silu_and_mul(x)
    x[5, 7] = 0
    return out


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (_slightly_off, "result 0"),
        (_writes_its_input, "argument 'x' was written"),
        (lambda x: ops.silu_and_mul(x).double(), "has dtype torch.float64"),
        (lambda x: ops.silu_and_mul(x)[:5], "has shape torch.Size"),
        (lambda x: ops.silu_and_mul(x).t().contiguous().t(), "has strides"),
        (lambda x: (ops.silu_and_mul(x), x), "2 results"),
    ],
    ids=["value", "written", "dtype", "shape", "strides", "number"],
)
def test_wrong_results(wrong: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check(CATALOG["silu_and_mul"], wrong, Case("one", (X,)))


def test_what_must_be_written_and_is_not() -> None:
    output = torch.full((3, 4), 7.0)
    with pytest.raises(AssertionError, match="argument 'output'"):
        check(CATALOG["moe_sum"], lambda input, output: None, Case("one", (torch.ones(3, 2, 4), output)))
    assert torch.equal(output, torch.full((3, 4), 7.0))


def test_copies_keep_strides_and_share_nothing() -> None:
    wide = torch.arange(60.0).view(6, 10)
    view = wide[1:5, 2:8].t()
    twin = copy(view)
    assert torch.equal(twin, view)
    assert twin.stride() == view.stride()
    twin.zero_()
    assert torch.equal(wide, torch.arange(60.0).view(6, 10))
