"""RMS norms."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated

from vllm_fl.dispatch import bind

from . import hw_agnostic, replace, transformers_norm

_rms_norm = bind("rms_norm")
_gemma_rms_norm = bind("gemma_rms_norm")
_rms_norm_gated = bind("rms_norm_gated")


class _RMSNormForward:
    forward_native: Any
    has_weight: bool
    variance_epsilon: float
    variance_size_override: int | None
    weight: torch.Tensor

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if self.variance_size_override is not None:
            # The mean over a part of the row (InternVL) is not the operator's; vLLM's own forward has it.
            return self.forward_native(x, residual)
        return _rms_norm.fn(x, residual, self.weight if self.has_weight else None, self.variance_epsilon)

    forward_cuda = forward_oot


class FLRMSNorm(_RMSNormForward, RMSNorm):
    """RMSNorm through the operator ``rms_norm``."""


class _GemmaRMSNormForward:
    variance_epsilon: float
    weight: torch.Tensor

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return _gemma_rms_norm.fn(x, residual, self.weight, self.variance_epsilon)

    forward_cuda = forward_oot


class FLGemmaRMSNorm(_GemmaRMSNormForward, GemmaRMSNorm):
    """GemmaRMSNorm through the operator ``gemma_rms_norm``."""


class FLRMSNormGated(RMSNormGated):
    """RMSNormGated through the operator ``rms_norm_gated``."""

    activation: str = "silu"  # what a vLLM that has no such argument computes

    def forward_oot(self, x: torch.Tensor, z: torch.Tensor | None = None) -> Any:
        return _rms_norm_gated.fn(x, z, self.weight, self.eps, self.group_size, self.norm_before_gate, self.activation)

    forward_cuda = forward_oot


def register_rms_norm() -> None:
    replace(RMSNorm, FLRMSNorm, "rms_norm")
    _replace_twin("HwAgnosticRMSNorm", hw_agnostic("layernorm", "RMSNorm"), _RMSNormForward, "rms_norm")
    _replace_twin("TPAwareRMSNorm", transformers_norm("TPAwareRMSNorm"), _RMSNormForward, "rms_norm")


def register_gemma_rms_norm() -> None:
    replace(GemmaRMSNorm, FLGemmaRMSNorm, "gemma_rms_norm")
    twin = transformers_norm("TPAwareGemmaRMSNorm")
    _replace_twin("TPAwareGemmaRMSNorm", twin, _GemmaRMSNormForward, "gemma_rms_norm")


def _replace_twin(name: str, twin: type | None, forward: type, operator: str) -> None:
    if twin is not None:
        replace(twin, type(f"FL{name}", (forward, twin), {}), operator)


def register_rms_norm_gated() -> None:
    replace(RMSNormGated, FLRMSNormGated, "rms_norm_gated")
