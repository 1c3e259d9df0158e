"""Root-mean-square normalisations; sums of squares are taken in float32, so float16 activations cannot overflow them.

On the CPU one call of a large operator costs memory traffic and one of a small operator costs its launch, so these
functions work in place on the float32 copies that they own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._dtypes import compute_dtype


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """``1 / sqrt(mean(x * x) + epsilon)`` over the last dimension, which is kept with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    dtype = compute_dtype(x.dtype)
    if residual is None:
        s, new_residual, owned = x.to(dtype), None, x.dtype != dtype
    else:
        s = x + residual if x.dtype == dtype else x.to(dtype).add_(residual)
        new_residual = s.to(residual.dtype).contiguous()
        owned = residual.dtype != dtype
    factor = _inverse_rms(s, epsilon)
    out = s.mul_(factor) if owned else s * factor
    if weight is not None:
        out.mul_(weight)
    out = out.to(x.dtype).contiguous()
    return out if new_residual is None else (out, new_residual)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalisation of the last dimension, after adding a residual if there is one."""
    return _rms_norm(x, residual, weight, epsilon)


def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalisation with a weight stored as its distance from 1."""
    return _rms_norm(x, residual, weight.to(compute_dtype(x.dtype)) + 1, epsilon)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> Tensor:
    """RMS normalisation with a gate, over groups of the last dimension.

    Raises:
        NotImplementedError: an activation other than ``silu``, ``swish`` and ``sigmoid``.
    """
    dtype = compute_dtype(x.dtype)
    s = x.to(dtype)
    factor = None if gate is None else _gate(gate.to(dtype), activation)
    if factor is not None and not norm_before_gate:
        s = s * factor
    if group_size is None or group_size == x.shape[-1]:
        out = s * _inverse_rms(s, epsilon)
    else:
        groups = s.unflatten(-1, (-1, group_size))
        out = (groups * _inverse_rms(groups, epsilon)).flatten(-2)
    out.mul_(weight)
    if factor is not None and norm_before_gate:
        out.mul_(factor)
    return out.to(x.dtype).contiguous()


def _gate(x: Tensor, activation: str) -> Tensor:
    if activation in ("silu", "swish"):
        return functional.silu(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    raise NotImplementedError(
        f"rms_norm_gated: activation {activation!r} is not implemented; it must be 'silu', 'swish' or 'sigmoid'"
    )
