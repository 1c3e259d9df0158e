"""What the operators refuse, and how they say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vllm_fl_reference.ops as ops


def message(error: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(error) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def test_attention_backend() -> None:
    assert ops.attention_backend() == "vllm_fl_reference.attention.PagedAttentionBackend"
    assert ops.attention_backend(use_mla=True) == "vllm_fl.integration.mla.MLABackend"
    for mla in (False, True):
        assert message(NotImplementedError, ops.attention_backend, mla, use_sparse=True) == (
            "the PyTorch reference has no backend for sparse attention"
        )


def test_activations() -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    assert message(NotImplementedError, ops.rms_norm_gated, x, x, weight, 1e-6, activation="gelu") == (
        "rms_norm_gated: activation 'gelu' is not implemented; it must be 'silu', 'swish' or 'sigmoid'"
    )
    states, slots = torch.zeros(3, 4, 3), torch.tensor([1, 2])
    expected = "causal_conv1d: activation 'relu' is not implemented; it must be 'silu', 'swish' or None"
    filters = torch.ones(4, 4)
    assert expected == message(NotImplementedError, ops.causal_conv1d_update, x, filters, None, states, slots, "relu")
    starts = torch.tensor([0, 1, 2])
    assert expected == message(
        NotImplementedError, ops.causal_conv1d_fn, x, filters, None, states, starts, slots, None, "relu"
    )
    assert torch.equal(states, torch.zeros(3, 4, 3))


def test_fused_experts() -> None:
    args = torch.zeros(2, 8), torch.zeros(3, 8, 8), torch.zeros(3, 8, 4), torch.ones(2, 2), torch.zeros(2, 2).int()
    assert message(NotImplementedError, ops.fused_experts, *args, "situ") == (
        "fused_experts: activation 'situ' is not implemented; it must be one of ['gelu', 'gelu_no_mul', 'gelu_tanh', "
        "'gelu_tanh_no_mul', 'relu2_no_mul', 'silu', 'silu_no_mul', 'swigluoai']"
    )
    assert message(ValueError, ops.fused_experts, *args, apply_router_weight_on_input=True) == (
        "fused_experts: apply_router_weight_on_input needs topk 1, got topk_ids of 2 columns"
    )


def test_grouped_topk() -> None:
    assert message(ValueError, ops.grouped_topk, torch.zeros(2, 8), 2, 1, 2, True, 1.0, None, 3) == (
        "grouped_topk: scoring_func 3; it must be 0 (scores as they are), 1 (sigmoid) or 2 (softmax)"
    )


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (4,), (2, 0)])
def test_scaled_mm_scales_of_a(shape: tuple[int, ...]) -> None:
    a, one = torch.zeros(2, 8, dtype=torch.int8), torch.ones(1)
    assert message(ValueError, ops.scaled_mm, a, a.t(), torch.ones(shape), one, "float32") == (
        f"scaled_mm: scale_a of shape {list(shape)} does not fit a matrix of shape [2, 8]; "
        "it must be [1], [M, 1] or [M, K / group]"
    )


@pytest.mark.parametrize("shape", [(3, 1), (2, 5), (5,), (0, 2)])
def test_scaled_mm_scales_of_b(shape: tuple[int, ...]) -> None:
    a, b, one = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(8, 4, dtype=torch.int8), torch.ones(1)
    assert message(ValueError, ops.scaled_mm, a, b, one, torch.ones(shape), "float32") == (
        f"scaled_mm: scale_b of shape {list(shape)} does not fit a matrix of shape [8, 4]; "
        "it must be [1], [1, N] or [K / group, N / group]"
    )
