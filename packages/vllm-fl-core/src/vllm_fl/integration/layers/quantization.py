"""Linear layers of float8 weights and activations: quantisation in groups, and the products.

vLLM's quantisation methods stay in charge of checkpoints and weights; they ask for a linear kernel, which is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

from vllm_fl.dispatch import bind
from vllm_fl.dispatch.types import dtype_name
from vllm_fl.integration import compat

from . import replace

_per_token_group_quant_fp8 = bind("per_token_group_quant_fp8")
_scaled_mm = bind("scaled_mm")


class FLQuantFP8(QuantFP8):
    """Quantisation of groups through the operator ``per_token_group_quant_fp8``; of tokens and tensors as vLLM does."""

    def forward_oot(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._groups(x) if self._is_ours(x) else self.forward_native(x, *args, **kwargs)

    def forward_cuda(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._groups(x) if self._is_ours(x) else super().forward_cuda(x, *args, **kwargs)

    def _is_ours(self, x: torch.Tensor) -> bool:
        """Scales for TMA and groups that do not fill a row are not the operator's."""
        groups = self.is_group_quant and not self.static and not self.tma_aligned_scales
        return groups and x.shape[-1] % self.group_size == 0

    def _groups(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = _per_token_group_quant_fp8.fn(
            x, self.group_size, 1e-10, self.column_major_scales, bool(self.use_ue8m0)
        )
        return result


class FLFp8Linear(FP8ScaledMMLinearKernel):
    """Products with scales of tensors, tokens and channels through the operator ``scaled_mm``."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        activation, weight = c.activation_quant_key.scale.group_shape, c.weight_quant_key.scale.group_shape
        if not (activation.is_per_tensor() or activation.is_per_token()):
            return False, "activations are scaled by tensor or by token only"
        # vLLM calls one scale an output both "channel" and "token", of weights [N, K].
        if not (weight.is_per_tensor() or weight.is_per_channel() or weight.is_per_token()):
            return False, "weights are scaled by tensor or by channel only"
        return True, None

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        scale_a = As.reshape(1) if As.numel() == 1 else As.reshape(-1, 1)
        scale_b = Bs.reshape(1) if Bs.numel() == 1 else Bs.reshape(1, -1)
        result: torch.Tensor = _scaled_mm.fn(A, B, scale_a, scale_b, dtype_name(out_dtype), bias)
        return result.view(output_shape)


class FLFp8BlockLinear(Fp8BlockScaledMMLinearKernel):
    """Products with scales of groups and blocks (DeepSeek-V3) through the operator ``scaled_mm``."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = _scaled_mm.fn(A, B.t(), As, Bs.t(), dtype_name(self.config.out_dtype), None)
        return result


def register_quant_fp8() -> None:
    replace(QuantFP8, FLQuantFP8, "quant_fp8")


def register_fp8_linear() -> None:
    compat.prefer_linear_kernels(_POSSIBLE_FP8_KERNELS=FLFp8Linear, _POSSIBLE_FP8_BLOCK_KERNELS=FLFp8BlockLinear)
