"""Norms, activations, rotary embedding, KV cache, routing and sampling, on the shapes of Qwen3 models.

vLLM's compiled kernels write into buffers that are made beforehand, as a CUDA graph would reuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import CATALOG, InputMaker

from .base import BF16, F32, I32, Case, Lookup, normal, one

EPSILON = 1e-6
VOCABULARY = 151936
EXPERTS, CHOICES = 512, 10


def c_ops() -> Any:
    """vLLM's compiled operators."""
    import vllm._custom_ops  # noqa: F401  loads them

    return torch.ops._C


def vllm_silu(x: Tensor) -> Callable[[], Tensor]:
    op, out = c_ops().silu_and_mul, x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    def call() -> Tensor:
        op(out, x)
        return out

    return call


def vllm_norm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Callable[[], Tensor]:
    from vllm import _custom_ops

    out = torch.empty_like(x)

    def call() -> Tensor:
        if residual is None:
            _custom_ops.rms_norm(out, x, weight, epsilon)
            return out
        _custom_ops.fused_add_rms_norm(x, residual, weight, epsilon)  # over its inputs
        return x

    return call


def vllm_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Callable[[], Tensor]:
    from vllm.third_party.flash_linear_attention.ops.layernorm_guard import rmsnorm_fn

    return lambda: rmsnorm_fn(x, weight, None, z=gate, eps=epsilon, norm_before_gate=True)


def vllm_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, neox: bool
) -> Callable[[], Tensor]:
    from vllm import _custom_ops

    table = torch.cat((cos, sin), -1)

    def call() -> Tensor:
        _custom_ops.rotary_embedding(positions, query, key, query.shape[-1], table, neox)  # over its inputs
        return query

    return call


def vllm_cache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Callable[[], None]:
    from vllm import _custom_ops

    one_, layout = torch.ones(1, device=key.device), (0, 2, 1, 3)
    both = keys.permute(layout), values.permute(layout)
    return lambda: _custom_ops.reshape_and_cache_flash(key, value, *both, slots, "auto", one_, one_)


def vllm_align(ids: Tensor, block_size: int, experts: int) -> Callable[[], Any]:
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    return lambda: moe_align_block_size(ids, block_size, experts)


def vllm_sum(x: Tensor, out: Tensor) -> Callable[[], Tensor]:
    from vllm import _custom_ops

    def call() -> Tensor:
        _custom_ops.moe_sum(x, out)
        return out

    return call


def vllm_topk(weights: Tensor, ids: Tensor, tokens: Tensor, logits: Tensor, renormalize: bool) -> Callable[[], Tensor]:
    from vllm import _custom_ops

    def call() -> Tensor:
        _custom_ops.topk_softmax(weights, ids, tokens, logits, renormalize)
        return weights

    return call


def vllm_penalties(logits: Tensor, prompt: Tensor, output: Tensor, penalties: Tensor) -> Callable[[], Tensor]:
    from vllm import _custom_ops

    def call() -> Tensor:
        _custom_ops.apply_repetition_penalties(logits, prompt, output, penalties)
        return logits

    return call


def vllm_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Callable[[], Tensor]:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    given = torch.empty_like(logits)  # it may write over its input
    return lambda: apply_top_k_top_p(given.copy_(logits), k, p)


def rotary_args(device: str, tokens: int) -> tuple[Any, ...]:
    angles = torch.outer(torch.arange(4096.0, device=device), 1e6 ** (-torch.arange(0, 128, 2, device=device) / 128))
    both = normal(device, tokens, 40 * 128)  # queries and keys as one projection leaves them
    query, key = both[:, : 32 * 128].unflatten(1, (32, 128)), both[:, 32 * 128 :].unflatten(1, (8, 128))
    positions = torch.randint(0, 4096, (tokens,), device=device)
    # Halves of one table, as in vLLM
    cos, sin = torch.cat((angles.cos(), angles.sin()), 1).to(BF16).chunk(2, -1)
    return query, key, cos, sin, positions, True


def cache_args(device: str, tokens: int) -> tuple[Any, ...]:
    blocks = tokens // 16 + 64
    both = normal(device, blocks, 16, 8, 256).permute(0, 2, 1, 3)
    slots = torch.randperm(blocks * 16, device=device)[:tokens]
    return normal(device, tokens, 8, 128), normal(device, tokens, 8, 128), both[..., :128], both[..., 128:], slots


def choices(device: str, tokens: int, experts: int = EXPERTS, topk: int = CHOICES) -> Tensor:
    return torch.rand(tokens, experts, device=device).topk(topk).indices.to(I32)


def topk_args(device: str, tokens: int) -> tuple[Any, ...]:
    ids = torch.zeros(tokens, CHOICES, device=device, dtype=I32)
    # Neighbouring numbers of the dtype in any order: equal logits would leave the choice open.
    logits = (torch.rand(tokens, EXPERTS, device=device).argsort(-1) + 0x3F00).to(torch.int16).view(BF16)
    return ids.to(F32), ids, ids.clone(), logits, True


def penalty_args(device: str, requests: int) -> tuple[Any, ...]:
    seen = torch.rand(2, requests, VOCABULARY, device=device) < 0.01
    logits = normal(device, requests, VOCABULARY, dtype=F32, scale=3.0)
    return logits, seen[0], seen[1], torch.rand(requests, device=device) + 1


def sampler_args(device: str, requests: int, limits: str) -> tuple[Any, ...]:
    k = torch.randint(1, 200, (requests,), device=device, dtype=I32) if "k" in limits else None
    logits = normal(device, requests, VOCABULARY, dtype=F32, scale=3.0)
    return logits, k, torch.rand(requests, device=device) * 0.5 + 0.5 if "p" in limits else None


def cut(ops: Lookup, given: tuple[Any, ...]) -> Tensor:
    """Top k and top p of a copy: what has been cut once has few entries left."""
    logits, k, p = given
    logits = logits.clone()
    ops("apply_top_k_top_p")(logits, k, p)
    return logits


def sized(name: str, tokens: int) -> Case:
    """The catalogue's own case of that many tokens."""

    def args(device: str) -> tuple[Any, ...]:
        make = CATALOG[name].sized
        if make is None:
            raise LookupError(f"the catalogue has no sized case of {name}")
        return make(InputMaker(BF16, device), tokens).args

    return one(name, f"{tokens}, catalogue's shape", args)


def general() -> Iterator[Case]:
    for t in (1, 256, 8192):
        yield one("silu_and_mul", f"[{t}, 2 x 9728]", lambda device, t=t: (normal(device, t, 2 * 9728),), vllm_silu)
        for with_residual in (False, True):

            def norm_args(device: str, t: int = t, with_residual: bool = with_residual) -> tuple[Any, ...]:
                residual = normal(device, t, 2560) if with_residual else None
                return normal(device, t, 2560), residual, normal(device, 2560), EPSILON

            kind = ", residual" if with_residual else ""
            yield one("rms_norm", f"[{t}, 2560]{kind}", norm_args, vllm_norm)
        yield one(
            "gemma_rms_norm", f"[{t}, 2048], residual",
            lambda device, t=t: (normal(device, t, 2048), normal(device, t, 2048), normal(device, 2048), EPSILON),
        )  # fmt: skip
        yield one(
            "rms_norm", f"[{t}, 32, 128], heads of a projection",
            lambda device, t=t: (
                normal(device, t, 6144)[:, :4096].unflatten(1, (32, 128)), None, normal(device, 128), EPSILON,
            ),
        )  # fmt: skip
        yield one(
            "rms_norm_gated", f"[{t} x 32, 128]",
            lambda device, t=t: (
                normal(device, 32 * t, 128), normal(device, 32 * t, 128), normal(device, 128), EPSILON,
            ),
            vllm_gated_norm,
        )  # fmt: skip
        yield one("rotary_embedding", f"{t}, 32 + 8 heads", lambda device, t=t: rotary_args(device, t), vllm_rotary)
        yield one("reshape_and_cache", f"{t}, 8 heads", lambda device, t=t: cache_args(device, t), vllm_cache)
        yield one("topk_softmax", f"{t}, 10 of 512", lambda device, t=t: topk_args(device, t), vllm_topk)
        yield one(
            "moe_sum", f"[{t}, 10, 2048]",
            lambda device, t=t: (normal(device, t, 10, 2048), normal(device, t, 2048)), vllm_sum,
        )  # fmt: skip
    for t, block in ((1, 16), (64, 16), (256, 16), (1024, 64), (4096, 64), (16384, 128)):
        yield one(
            "moe_align_block_size", f"{t}, 10 of 512, blocks of {block}",
            lambda device, t=t, block=block: (choices(device, t), block, EXPERTS), vllm_align,
        )  # fmt: skip
    for t in (1, 64, 256):
        yield one("apply_repetition_penalties", f"{t}", lambda device, t=t: penalty_args(device, t), vllm_penalties)
        for limits in ("k and p", "k alone", "p alone"):
            name = "apply_top_k_top_p"
            yield Case(
                name, f"{t}, {limits}", lambda device, t=t, limits=limits: sampler_args(device, t, limits),
                cut, (name,), vllm_top_k_top_p,
            )  # fmt: skip
    for name in (
        "gelu_and_mul", "topk_sigmoid", "grouped_topk", "fused_experts", "compute_slot_mapping",
        "per_token_group_quant_fp8", "scaled_mm",
    ):  # fmt: skip
        for t in (64, 4096):
            yield sized(name, t)
