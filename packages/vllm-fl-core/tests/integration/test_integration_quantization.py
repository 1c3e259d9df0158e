"""Linear layers of float8 weights: vLLM asks for a kernel and gets ours, which calls the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    QuantKey,
    ScaleDesc,
)

from vllm_fl.integration.layers.quantization import FLFp8BlockLinear, FLFp8Linear, FLQuantFP8

FP8 = torch.float8_e4m3fn
ROWS, K, N = 5, 256, 160


def key(shape: GroupShape, *, static: bool) -> QuantKey:
    return QuantKey(FP8, ScaleDesc(torch.float32, static, shape), symmetric=True)


def kernel_of(activation: QuantKey, weight: QuantKey) -> Any:
    return init_fp8_linear_kernel(
        activation_quant_key=activation,
        weight_quant_key=weight,
        input_dtype=torch.float32,
        out_dtype=torch.float32,
        weight_shape=(N, K),
    )


def quantised(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and scales of what remains after the maximum over `dims`."""
    scale = x.abs().amax(dims, keepdim=True) / 448.0
    return (x / scale).to(FP8), scale


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("scheme", ["token", "tensor", "static"])
def test_scales_of_tensors_tokens_and_channels(
    scheme: str, channels: bool, with_bias: bool, vllm_config: Any, spy: Any
) -> None:
    activation = key(GroupShape.PER_TOKEN if scheme == "token" else GroupShape.PER_TENSOR, static=scheme == "static")
    kernel = kernel_of(activation, key(GroupShape.PER_TOKEN if channels else GroupShape.PER_TENSOR, static=True))
    assert isinstance(kernel, FLFp8Linear)
    x, bias = torch.randn(2, ROWS, K), torch.randn(N) if with_bias else None
    weight, weight_scale = quantised(torch.randn(N, K), (1,) if channels else (0, 1))
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = weight.t(), weight_scale if channels else weight_scale.reshape(())
    layer.input_scale, layer.input_scale_ub = (torch.tensor(0.02) if scheme == "static" else None), None
    seen = spy("scaled_mm")
    got = kernel.apply_weights(layer, x, bias)
    flat = x.reshape(-1, K)
    dims = {"token": (1,), "tensor": (0, 1), "static": ()}[scheme]
    scale = torch.tensor([[0.02]]) if scheme == "static" else quantised(flat, dims)[1]
    values = (flat / scale).clamp(-448, 448).to(FP8)
    want = (values.double() * scale.double()) @ (weight.double() * weight_scale.double()).t()
    want = want if bias is None else want + bias.double()
    # Half a step of float8 where vLLM multiplies by the reciprocal of the scale.
    torch.testing.assert_close(got.double(), want.reshape(2, ROWS, N), rtol=2e-2, atol=2e-1)
    assert seen.calls == 1


@pytest.mark.parametrize("outputs", [N, 256])
def test_scales_of_groups_and_blocks(outputs: int, vllm_config: Any, spy: Any) -> None:
    kernel = kernel_of(key(GroupShape(1, 128), static=False), key(GroupShape(128, 128), static=True))
    assert isinstance(kernel, FLFp8BlockLinear)
    weight = torch.randn(outputs, K)
    blocks = torch.stack([
        torch.stack([weight[r : r + 128, c : c + 128].abs().max() / 448 for c in range(0, K, 128)])
        for r in range(0, outputs, 128)
    ])  # fmt: skip
    every = blocks.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale_inv = (weight / every).to(FP8), blocks
    quantisations, products = spy("per_token_group_quant_fp8"), spy("scaled_mm")
    x = torch.randn(ROWS, K)
    got = kernel.apply_weights(layer, x)
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    values = ((groups / scale).to(FP8).double() * scale.double()).flatten(-2)
    want = values @ (layer.weight.double() * every.double()).t()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    assert (quantisations.calls, products.calls) == (1, 1)


def test_what_the_operator_does_not_quantise_stays_with_vllm(vllm_config: Any, spy: Any) -> None:
    seen, x = spy("per_token_group_quant_fp8"), torch.randn(3, 200)
    for quantise in (QuantFP8(False, GroupShape.PER_TOKEN), QuantFP8(False, GroupShape(1, 128))):
        assert isinstance(quantise, FLQuantFP8)
        got, want = quantise(x), quantise.forward_native(x)
        assert torch.equal(got[0].float(), want[0].float())
        torch.testing.assert_close(got[1], want[1])
    assert seen.calls == 0


def test_other_scales_are_left_to_other_kernels() -> None:
    class Config:
        activation_quant_key = key(GroupShape(1, 128), static=False)
        weight_quant_key = key(GroupShape.PER_TENSOR, static=True)

    assert FLFp8Linear.can_implement(Config) == (False, "activations are scaled by tensor or by token only")
