"""RMS normalisations against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DTYPE_IDS, DTYPES, TOKENS, check, cut, maker

from vllm_fl.flagos.kernels import normalization
from vllm_fl.flagos.kernels.normalization import gemma_rms_norm, rms_norm, rms_norm_gated

EPSILON = 1e-6
WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
SHAPES = [(3, 64), (5, 7), (2, 1), (9, 100), (2, 3, 128), (2, 2, 3, 16), (1500,), (0, 32), (2, 1030)]


@WITH_DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
def test_rms_norm(device: str, dtype: torch.dtype, shape: tuple[int, ...], has_residual: bool) -> None:
    make = maker(dtype)
    x, weight = make.normal(*shape), make.normal(shape[-1])
    check(rms_norm, "rms_norm", x, make.normal(*shape) if has_residual else None, weight, EPSILON)


@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
def test_without_weight(device: str, has_residual: bool) -> None:
    make = maker()
    check(rms_norm, "rms_norm", make.normal(4, 48), make.normal(4, 48) if has_residual else None, None, EPSILON)


@WITH_DTYPES
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
def test_gemma(device: str, dtype: torch.dtype, has_residual: bool) -> None:
    make = maker(dtype)
    x, weight = make.normal(5, 96), make.normal(96, scale=0.1)
    check(gemma_rms_norm, "gemma_rms_norm", x, make.normal(5, 96) if has_residual else None, weight, EPSILON)


@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
def test_rows_too_long_for_registers(device: str, has_residual: bool) -> None:
    make = maker()
    size = normalization._MOST + 5
    x, weight = make.normal(2, size), make.normal(size)
    check(rms_norm, "rms_norm", x, make.normal(2, size) if has_residual else None, weight, EPSILON)
    check(gemma_rms_norm, "gemma_rms_norm", x, None, weight, EPSILON)


def test_residual_and_weight_of_other_dtypes(device: str) -> None:
    make = maker(torch.float16)
    x, residual = make.normal(4, 64), make.normal(4, 64, dtype=torch.float32)
    check(rms_norm, "rms_norm", x, residual, make.normal(64, dtype=torch.float32), EPSILON)


@pytest.mark.parametrize("tokens", TOKENS)
def test_heads_of_a_slice(device: str, tokens: int) -> None:
    """The query norm of Qwen3: heads of a part of the projection, neither rows nor tokens being adjacent."""
    make = maker()
    projected = make.normal(tokens, 10 * 32)
    heads = projected[:, 64:192].view(tokens, 4, 32)
    check(rms_norm, "rms_norm", heads, None, make.normal(32), EPSILON)


def test_strided_rows_and_residual(device: str) -> None:
    make = maker()
    x, residual = cut(make.normal(6, 40), 64), cut(make.normal(6, 40), 48, start=4)
    check(rms_norm, "rms_norm", x, residual, make.normal(40), EPSILON)


def test_large_float16_values_do_not_overflow(device: str) -> None:
    x = torch.full((2, 64), 3e4, dtype=torch.float16, device=device)
    check(rms_norm, "rms_norm", x, None, torch.ones(64, dtype=torch.float16, device=device), EPSILON)


def test_refuses_a_strided_last_dimension(device: str) -> None:
    x = torch.zeros(4, 16, device=device)
    with pytest.raises(NotImplementedError) as caught:
        rms_norm(x, x.t().contiguous().t(), None, EPSILON)
    assert str(caught.value) == "residual: the last dimension has stride 4, expected 1"


@WITH_DTYPES
@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "swish"])
@pytest.mark.parametrize(("shape", "group"), [((5, 32), None), ((3, 96), 24), ((2, 3, 64), None)], ids=str)
def test_gated(
    device: str, dtype: torch.dtype, norm_before_gate: bool, activation: str, shape: tuple[int, ...], group: int | None
) -> None:
    make = maker(dtype)
    x, gate, weight = make.normal(*shape), make.normal(*shape), make.normal(shape[-1])
    check(rms_norm_gated, "rms_norm_gated", x, gate, weight, EPSILON, group, norm_before_gate, activation)


@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("group", [None, 16])
def test_gated_without_gate(device: str, norm_before_gate: bool, group: int | None) -> None:
    make = maker()
    check(rms_norm_gated, "rms_norm_gated", make.normal(3, 48), None, make.normal(48), EPSILON, group, norm_before_gate)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_gated_strides_differ(device: str, tokens: int) -> None:
    make = maker()
    x = cut(make.normal(tokens, 64), 96)
    gate = make.normal(tokens, 200)[:, 100:164]
    check(rms_norm_gated, "rms_norm_gated", x, gate, make.normal(64), EPSILON, 16, True, "silu")


def test_gated_heads_with_groups(device: str) -> None:
    make = maker()
    x, gate = make.normal(3, 4, 64)[:, 1:3], make.normal(3, 2, 64)
    check(rms_norm_gated, "rms_norm_gated", x, gate, make.normal(64), EPSILON, 32, False, "sigmoid")


def test_gated_refuses_another_activation(device: str) -> None:
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(NotImplementedError) as caught:
        rms_norm_gated(x, x, x[0], EPSILON, activation="tanh")
    assert str(caught.value) == "activation: 'tanh' is not one of silu, swish, sigmoid"
