"""Step 2: normalisations."""

from __future__ import annotations

from torch import Tensor
from vllm_fl_reference import ops


def rms_norm_acme(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """``s / sqrt(mean(s * s) + epsilon) * weight`` with ``s = x + residual``; with a residual, (that, s).

    Reference-based: put your kernel here. It must not write `x` or `residual`, and the squares need float32.
    """
    return ops.rms_norm(x, residual, weight, epsilon)
