"""Gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import activation as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(called_from="SiluAndMul", cases=inputs.silu_and_mul, sized=sized.silu_and_mul)
def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half.

    ``silu(x[..., :d]) * x[..., d:]`` with ``silu(v) = v * sigmoid(v)``.

    Args:
        x: [..., 2 * d], floating.

    Returns:
        [..., d], dtype of `x`.
    """
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operator(called_from="GeluAndMul", cases=inputs.gelu_and_mul, sized=sized.gelu_and_mul)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of the first half of the last dimension, times the second half.

    Args:
        x: [..., 2 * d], floating.
        approximate: ``"none"`` for the error function, ``"tanh"`` for the tanh form.

    Returns:
        [..., d], dtype of `x`.
    """
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
