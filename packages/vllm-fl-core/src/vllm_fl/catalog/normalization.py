"""Root-mean-square normalisations (Zhang and Sennrich, 2019). The mean of squares is taken in float32 or wider."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import normalization as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(called_from="RMSNorm", cases=inputs.rms_norm, sized=sized.rms_norm)
def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalisation of the last dimension, after adding a residual if there is one.

    With ``s = x + residual`` (or ``x``), the result is ``s / sqrt(mean(s * s) + epsilon) * weight``. The sum and
    the mean are taken in float32; the sum is rounded to the dtype of `residual` when it is returned.

    Args:
        x: [..., H], floating.
        residual: [..., H], or None.
        weight: [H], or None for 1.
        epsilon: added to the mean of squares.

    Returns:
        [..., H] in the dtype of `x`; with a residual, (that, the sum in the dtype of `residual`).
    """
    out = x.new_empty(x.shape)
    return out if residual is None else (out, residual.new_empty(residual.shape))


@operator(called_from="GemmaRMSNorm", cases=inputs.gemma_rms_norm, sized=sized.gemma_rms_norm)
def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """As rms_norm, with the weight stored as its distance from 1: the factor is ``1 + weight``, in float32.

    Args:
        x: [..., H], floating.
        residual: [..., H], or None.
        weight: [H].
        epsilon: added to the mean of squares.

    Returns:
        [..., H] in the dtype of `x`; with a residual, (that, the sum in the dtype of `residual`).
    """
    out = x.new_empty(x.shape)
    return out if residual is None else (out, residual.new_empty(residual.shape))


@operator(called_from="RMSNormGated", cases=inputs.rms_norm_gated, sized=sized.rms_norm_gated)
def rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> Tensor:
    """RMS normalisation with a gate, as in gated linear attention and Mamba 2.

    With ``norm_before_gate``, ``norm(x) * weight * act(gate)``; else ``norm(x * act(gate)) * weight``. The mean of
    squares runs over groups of `group_size` neighbours of the last dimension (None: over all of it).

    Args:
        x: [..., H], floating.
        gate: [..., H], or None for no gate.
        weight: [H].
        epsilon: added to the mean of squares.
        group_size: divides H, or None.
        norm_before_gate: order of norm and gate.
        activation: ``"silu"`` (``"swish"`` is the same) or ``"sigmoid"``.

    Returns:
        [..., H], dtype of `x`.
    """
    return x.new_empty(x.shape)
