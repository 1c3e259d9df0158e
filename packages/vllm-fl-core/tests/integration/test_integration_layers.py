"""Our layers compute what vLLM's PyTorch forwards compute, through the operator wherever it can express them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.fope import FourierRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from vllm_fl.integration.layers import transformers_norm

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("vllm_config")


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal within what rounding to the dtype, at two places, can make."""
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple)
        for left, right in zip(ours, theirs, strict=True):
            assert_same(left, right)
    elif theirs is None:
        assert ours is None
    else:
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        exact = theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 8), (0, 6)], ids=str)
@pytest.mark.parametrize(
    ("make", "operator"),
    [
        pytest.param(SiluAndMul, "silu_and_mul", id="silu"),
        pytest.param(GeluAndMul, "gelu_and_mul", id="gelu"),
        pytest.param(lambda: GeluAndMul(approximate="tanh"), "gelu_and_mul", id="gelu-tanh"),
    ],
)
def test_activation(make: Any, operator: str, shape: tuple[int, ...], dtype: torch.dtype, spy: Any) -> None:
    layer, seen, x = make(), spy(operator), torch.randn(shape, dtype=dtype)
    assert_same(layer(x), layer.forward_native(x))
    assert seen.calls == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("has_weight", [True, False], ids=["weight", "no-weight"])
def test_rms_norm(has_weight: bool, with_residual: bool, dtype: torch.dtype, spy: Any) -> None:
    layer = RMSNorm(16, eps=1e-5, has_weight=has_weight, dtype=dtype)
    layer.weight.data.uniform_(0.5, 1.5)
    args = tuple(torch.randn(7, 16, dtype=dtype) for _ in range(2 if with_residual else 1))
    seen = spy("rms_norm")
    assert_same(layer(*map(torch.clone, args)), layer.forward_native(*map(torch.clone, args)))
    assert seen.calls == 1


@pytest.mark.parametrize(
    ("name", "operator"), [("TPAwareRMSNorm", "rms_norm"), ("TPAwareGemmaRMSNorm", "gemma_rms_norm")]
)
def test_norms_of_the_transformers_backend(name: str, operator: str, spy: Any) -> None:
    twin = transformers_norm(name)
    if twin is None:
        pytest.skip("this vLLM's transformers backend has no norms of its own")
    norm, seen, x = twin(32), spy(operator), torch.randn(3, 32)
    torch.testing.assert_close(norm(x), norm.forward_native(x))
    assert seen.calls == 1


def test_rms_norm_over_a_part_of_the_row_stays_with_vllm(spy: Any) -> None:
    layer, seen, x = RMSNorm(16, var_hidden_size=8), spy("rms_norm"), torch.randn(3, 16)
    assert_same(layer(x), layer.forward_native(x))
    assert not torch.allclose(layer(x), RMSNorm(16)(x))
    assert seen.calls == 1  # of the layer that the result is compared with


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_gemma_rms_norm(with_residual: bool, dtype: torch.dtype, spy: Any) -> None:
    layer = GemmaRMSNorm(16).to(dtype)
    layer.weight.data.uniform_(-0.5, 0.5)
    args = tuple(torch.randn(7, 16, dtype=dtype) for _ in range(2 if with_residual else 1))
    seen = spy("gemma_rms_norm")
    assert_same(layer(*map(torch.clone, args)), layer.forward_native(*map(torch.clone, args)))
    assert seen.calls == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm-first", "gate-first"])
@pytest.mark.parametrize("group_size", [None, 8], ids=["one-group", "groups"])
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no-gate"])
def test_rms_norm_gated(
    gated: bool, group_size: int | None, norm_before_gate: bool, activation: str, dtype: torch.dtype, spy: Any
) -> None:
    layer = RMSNormGated(
        16, group_size=group_size, norm_before_gate=norm_before_gate, activation=activation, dtype=dtype
    )
    layer.weight.data.uniform_(0.5, 1.5)
    x, z = torch.randn(7, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype) if gated else None
    seen = spy("rms_norm_gated")
    assert_same(layer(x, z), layer.forward_native(x, z))
    assert seen.calls == 1


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 1000.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def rope(kind: str = "default", dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    parameters = {"rope_theta": 10000.0, **ROPES[kind], **kwargs.pop("parameters", {})}
    arguments = {"head_size": 16, "max_position": 64, "is_neox_style": True, "dtype": dtype, **kwargs}
    return get_rope(rope_parameters=parameters, **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary(kind: str, is_neox_style: bool, dtype: torch.dtype, spy: Any) -> None:
    layer, seen = rope(kind, dtype, is_neox_style=is_neox_style), spy("rotary_embedding")
    positions = torch.randint(0, 64, (5,))
    q, k = torch.randn(5, 4 * 16, dtype=dtype), torch.randn(5, 2 * 16, dtype=dtype)
    for _ in range(2):  # the second time from the table that was split at the first
        assert_same(layer(positions, q.clone(), k.clone()), layer.forward_native(positions, q.clone(), k.clone()))
    assert seen.calls == 2


def test_rotary_of_a_part_of_each_head(spy: Any) -> None:
    layer, seen = rope(parameters={"partial_rotary_factor": 0.5}), spy("rotary_embedding")
    assert layer.rotary_dim == 8
    positions, q, k = torch.arange(5), torch.randn(5, 4 * 16), torch.randn(5, 2 * 16)
    ours, _ = layer(positions, q, k)
    assert_same(layer(positions, q, k), layer.forward_native(positions, q, k))
    assert torch.equal(ours.view(5, 4, 16)[..., 8:], q.view(5, 4, 16)[..., 8:])
    assert seen.calls == 2


def test_rotary_without_a_key(spy: Any) -> None:
    layer, seen, positions, q = rope(), spy("rotary_embedding"), torch.arange(5), torch.randn(5, 4 * 16)
    assert_same(layer(positions, q, None), layer.forward_native(positions, q, None))
    assert_same(layer(positions, q), layer.forward_native(positions, q))
    assert seen.calls == 2


@pytest.mark.parametrize("shape", [(2, 5, 64), (10, 64), (10, 4, 16)], ids=["batched", "flat", "heads"])
def test_rotary_keeps_the_shape_that_it_is_given(shape: tuple[int, ...], spy: Any) -> None:
    layer, seen = rope(), spy("rotary_embedding")
    positions = torch.arange(10).view(shape[:2] if len(shape) == 3 and shape[0] == 2 else (10,))
    q, k = torch.randn(shape), torch.randn(shape)
    assert_same(layer(positions, q, k), layer.forward_native(positions, q, k))
    assert seen.calls == 1


def test_rotary_of_slices_of_one_projection() -> None:
    layer, positions, qkv = rope(), torch.arange(5), torch.randn(5, 8 * 16)
    q, k, _ = qkv.split([4 * 16, 2 * 16, 2 * 16], dim=-1)
    assert_same(layer(positions, q, k), layer.forward_native(positions, q.clone(), k.clone()))


def test_rotary_in_another_dtype_than_its_table() -> None:
    layer, positions = rope(dtype=torch.float32), torch.arange(5)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        q, k = torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
        assert_same(layer(positions, q, k), layer.forward_native(positions, q, k))


def test_deepseek_rotary_of_heads_with_offsets(spy: Any) -> None:
    layer = DeepseekScalingRotaryEmbedding(16, 16, 64, 10000.0, False, 4.0, torch.float32)
    seen = spy("rotary_embedding")
    positions, offsets = torch.arange(5), torch.tensor([0, 3, 1, 7, 2])
    q, k = torch.randn(5, 4, 16), torch.randn(5, 1, 16)
    assert_same(layer(positions, q, k), layer.forward_native(positions, q, k))
    assert_same(layer(positions, q, k, offsets), layer.forward_native(positions, q, k, offsets))
    assert seen.calls == 2


def test_multimodal_rotary_is_ours_for_text_only(spy: Any) -> None:
    layer = MRotaryEmbedding(16, 16, 64, 10000.0, True, torch.float32, mrope_section=[2, 3, 3])
    seen, q, k = spy("rotary_embedding"), torch.randn(5, 64), torch.randn(5, 32)
    text = torch.arange(5)
    assert_same(layer(text, q, k), layer.forward_native(text, q, k))
    assert seen.calls == 1
    sections = torch.randint(0, 64, (3, 5))
    assert_same(layer(sections, q, k), layer.forward_native(sections, q, k))
    assert seen.calls == 1


def test_rotary_with_arithmetic_of_its_own_stays_with_vllm() -> None:
    from vllm_fl.integration.layers.rotary import plain_classes

    plain = {cls for cls, _ in plain_classes()}
    assert {RotaryEmbedding, DeepseekScalingRotaryEmbedding, MRotaryEmbedding} <= plain
    assert FourierRotaryEmbedding not in plain


def test_compiled_without_a_graph_break() -> None:
    norm, act, rotary = RMSNorm(64), SiluAndMul(), rope()

    def block(positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, residual = norm(x, residual)
        q, k = rotary(positions, x, x)
        return act(torch.cat((q, k), dim=-1)), residual

    args = (torch.arange(5), torch.randn(5, 64), torch.randn(5, 64))
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert_same(compiled(*args), block(*args))
