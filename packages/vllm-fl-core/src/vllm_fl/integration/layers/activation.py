"""Gated activations."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from vllm_fl.dispatch import bind

from . import hw_agnostic, replace

_silu_and_mul = bind("silu_and_mul")
_gelu_and_mul = bind("gelu_and_mul")


class _SiluAndMulForward:
    def forward_oot(self, x: torch.Tensor) -> Any:
        return _silu_and_mul.fn(x)

    forward_cuda = forward_oot


class _GeluAndMulForward:
    approximate: str

    def forward_oot(self, x: torch.Tensor) -> Any:
        return _gelu_and_mul.fn(x, self.approximate)

    forward_cuda = forward_oot


class FLSiluAndMul(_SiluAndMulForward, SiluAndMul):
    """SwiGLU through the operator ``silu_and_mul``."""


class FLGeluAndMul(_GeluAndMulForward, GeluAndMul):
    """GeGLU through the operator ``gelu_and_mul``."""


def register_silu_and_mul() -> None:
    replace(SiluAndMul, FLSiluAndMul, "silu_and_mul")
    twin = hw_agnostic("activation", "SiluAndMul")
    if twin is not None:
        replace(twin, type("FLHwAgnosticSiluAndMul", (_SiluAndMulForward, twin), {}), "silu_and_mul")


def register_gelu_and_mul() -> None:
    replace(GeluAndMul, FLGeluAndMul, "gelu_and_mul")
