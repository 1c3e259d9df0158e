"""Activations, norms, rotary embedding, sampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .simulated_registry import FLOATING, require, require_dtypes, require_one_dtype


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    require_dtypes("npu_swiglu", FLOATING, input=input)
    require("npu_swiglu", input.dim() > 0 and input.shape[dim] % 2 == 0, f"no two halves in {tuple(input.shape)}")
    first, second = input.float().chunk(2, dim)
    return (F.silu(first) * second).to(input.dtype)


def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    require_dtypes("npu_geglu", FLOATING, input=input)
    require("npu_geglu", input.shape[dim] % 2 == 0, f"no two halves in {tuple(input.shape)}")
    require("npu_geglu", approximate in (0, 1), f"approximate={approximate}")
    left, right = input.float().chunk(2, dim)
    activated, factor = (left, right) if activate_left else (right, left)
    gelu = F.gelu(activated, approximate="tanh" if approximate else "none")
    return (gelu * factor).to(input.dtype), gelu.to(input.dtype)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require_dtypes("npu_rms_norm", FLOATING, input=input)
    require_one_dtype("npu_rms_norm", input=input, gamma=gamma)
    require("npu_rms_norm", 2 <= input.dim() <= 8, f"input has {input.dim()} dimensions")
    require("npu_rms_norm", gamma.shape == input.shape[-gamma.dim() :], f"gamma is {tuple(gamma.shape)}")
    x = input.float()
    dims = tuple(range(-gamma.dim(), 0))
    rstd = (x.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    require_one_dtype("npu_add_rms_norm", x1=x1, x2=x2, gamma=gamma)
    require("npu_add_rms_norm", 1 <= x1.dim() <= 8 and x1.shape == x2.shape, f"{tuple(x1.shape)}, {tuple(x2.shape)}")
    total = x1 + x2
    out, rstd = npu_rms_norm(total, gamma, epsilon)
    return out, rstd, total


def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require_dtypes("npu_gemma_rms_norm", FLOATING, input=input)
    require_one_dtype("npu_gemma_rms_norm", input=input, gamma=gamma)
    require("npu_gemma_rms_norm", 1 <= input.dim() <= 8, f"input has {input.dim()} dimensions")
    require("npu_gemma_rms_norm", gamma.shape == input.shape[-gamma.dim() :], f"gamma is {tuple(gamma.shape)}")
    contiguous = input.is_contiguous() and gamma.is_contiguous()
    require("npu_gemma_rms_norm", input.numel() > 0 and contiguous, "it takes no empty tensors, and none with strides")
    x = input.float()
    rstd = (x.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon).rsqrt()
    return (x * rstd * (1 + gamma.float())).to(input.dtype), rstd


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Layout BSND only."""
    require_dtypes("npu_rotary_mul", FLOATING, input=input, r1=r1, r2=r2)
    require("npu_rotary_mul", input.dim() == r1.dim() == r2.dim() == 4, "the simulation knows 4 dimensions only")
    batch, length, heads, size = input.shape
    require("npu_rotary_mul", rotary_mode in ("half", "interleave"), f"rotary_mode={rotary_mode!r}")
    require("npu_rotary_mul", size < 896 and size % 2 == 0, f"size {size}")
    limit = batch * heads if rotary_mode == "interleave" else max(batch, heads)
    require("npu_rotary_mul", limit < 1000, f"{batch} batches of {heads} heads")
    shapes = {(1, length, 1, size)}
    if rotary_mode == "half":
        shapes |= {(batch, length, 1, size), tuple(input.shape)}
    for name, angles in (("r1", r1), ("r2", r2)):
        require(
            "npu_rotary_mul", tuple(angles.shape) in shapes, f"{name} is {tuple(angles.shape)}, not one of {shapes}"
        )
        require("npu_rotary_mul", bool((angles.abs() <= 1).all()), f"{name} has values beyond 1")
    x = input.float()
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * r1.float() + turned * r2.float()).to(input.dtype)


def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """In place, whole heads."""
    require_one_dtype("_npu_rotary_embedding", query=query, key=key, cos_sin_cache=cos_sin_cache)
    require_dtypes("_npu_rotary_embedding", (torch.int64,), positions=positions)
    require("_npu_rotary_embedding", cos_sin_cache.shape[1] == head_size, "whole heads are rotated")
    require("_npu_rotary_embedding", query.dim() == key.dim() == 2, "queries and keys are [T, heads * size]")
    angles = cos_sin_cache[positions].float()[:, None]
    cos, sin = angles.chunk(2, -1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size).float()
        first, second = heads.chunk(2, -1) if is_neox_style else (heads[..., ::2], heads[..., 1::2])
        parts = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.cat(parts, -1) if is_neox_style else torch.stack(parts, -1).flatten(-2)
        x.copy_(turned.flatten(1))


def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    require_dtypes("npu_top_k_top_p", FLOATING, logits=logits)
    require("npu_top_k_top_p", logits.dim() == 2, f"logits are {tuple(logits.shape)}")
    rows, columns = logits.shape
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        require_dtypes("npu_top_k_top_p", (torch.int32,), k=k)
        require("npu_top_k_top_p", tuple(k.shape) == (rows,), f"k is {tuple(k.shape)}")
        require("npu_top_k_top_p", bool(((k >= 1) & (k <= min(1024, columns))).all()), f"k is {k.tolist()}")
        threshold = values.gather(-1, (columns - k.long())[:, None])
        values = values.masked_fill(values < threshold, float("-inf"))
    if p is not None:
        require_one_dtype("npu_top_k_top_p", logits=logits, p=p)
        require("npu_top_k_top_p", tuple(p.shape) == (rows,), f"p is {tuple(p.shape)}")
        require("npu_top_k_top_p", bool(((p >= 0) & (p <= 1)).all()), f"p is {p.tolist()}")
        dropped = values.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        dropped[:, -1] = False
        values = values.masked_fill(dropped, float("-inf"))
    return torch.empty_like(values).scatter_(-1, order, values).to(logits.dtype)
