"""Gated activations against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DTYPE_IDS, DTYPES, TOKENS, check, cut, maker

from vllm_fl.flagos.kernels.activation import gelu_and_mul, silu_and_mul

SHAPES = [(5, 2 * 7), (3, 2 * 1024), (2, 2 * 1500), (2, 3, 2 * 24), (2 * 8,), (0, 2 * 16), (3, 0)]
WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)


@WITH_DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(silu_and_mul, "silu_and_mul", maker(dtype).normal(*shape, scale=3.0))


@WITH_DTYPES
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_gelu(device: str, dtype: torch.dtype, approximate: str, shape: tuple[int, ...]) -> None:
    check(gelu_and_mul, "gelu_and_mul", maker(dtype).normal(*shape, scale=3.0), approximate)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_of_a_wider_tensor(device: str, tokens: int) -> None:
    x = cut(maker().normal(tokens, 2 * 40), 128, start=16)
    assert not x.is_contiguous() or tokens == 1
    check(silu_and_mul, "silu_and_mul", x)


def test_extreme_values(device: str) -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, -0.0, 88.0, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    check(silu_and_mul, "silu_and_mul", x)
    check(gelu_and_mul, "gelu_and_mul", x, "tanh")


def test_more_rows_than_a_grid_has(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_fl.flagos.kernels.activation.GRID_ROWS", 4)
    check(silu_and_mul, "silu_and_mul", maker().normal(11, 2 * 16))


def test_refuses_a_strided_last_dimension(device: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        silu_and_mul(torch.zeros(4, 16, device=device)[:, ::2])
    assert str(caught.value) == "x: the last dimension has stride 2, expected 1"


def test_refuses_another_approximation(device: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        gelu_and_mul(torch.zeros(4, 16, device=device), "quick")
    assert str(caught.value) == "approximate: 'quick' is not one of none, tanh"
