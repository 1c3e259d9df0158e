"""Launches of every kernel with the shapes of models, for the tests that compile them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from launches import TARGETS

from vllm_fl.flagos.kernels import (
    activation,
    cache,
    causal_conv1d,
    fused_moe,
    gated_delta_chunk,
    gated_delta_rule,
    mla,
    moe_align,
    moe_routing,
    moe_sum,
    normalization,
    paged_attention,
    quantization,
    rotary,
    sampling,
)


@dataclass(frozen=True)
class Case:
    """A launcher with the shapes of a model; `call` takes the number of tokens (or requests).

    Args:
        name: for the test's id.
        call: calls the launcher with meta tensors.
        targets: names of :data:`TARGETS`; the kernel is for these only.
        variants: compilations of each kernel over all batch sizes.
        spills: kernel -> target -> bytes that it may spill, with the reason in a comment.
        tokens: how many the compiled launch has.
    """

    name: str
    call: Callable[[int], Any]
    targets: tuple[str, ...] = tuple(TARGETS)
    variants: int = 1
    spills: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tokens: int = 256


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _norm(tokens: int, *, residual: bool) -> None:
    x = meta(tokens, 2560)
    normalization.rms_norm(x, meta(tokens, 2560) if residual else None, meta(2560), 1e-6)


def _heads_norm(tokens: int) -> None:
    heads = meta(tokens, 6144)[:, :4096].view(tokens, 32, 128)
    normalization.rms_norm(heads, None, meta(128), 1e-6)


def _gated(tokens: int, *, group: int | None) -> None:
    x = meta(tokens, 4096) if group else meta(tokens, 32, 128)
    normalization.rms_norm_gated(x, x, meta(x.shape[-1]), 1e-6, group, group is None)


def _rotary(tokens: int, *, rotated: int, neox: bool, has_key: bool = True) -> None:
    projected = meta(tokens, 40 * 256)
    query, key = projected[:, : 32 * 256].view(tokens, 32, 256), projected[:, 32 * 256 :].view(tokens, 8, 256)
    cos, sin = meta(4096, rotated).chunk(2, -1)
    positions = meta(tokens, dtype=torch.int64)
    rotary.rotary_embedding(query, key if has_key else None, cos, sin, positions, neox)


def _write_cache(tokens: int) -> None:
    both = meta(1000, 16, 8, 256).permute(0, 2, 1, 3)
    rows = meta(tokens, 8, 128)
    cache.reshape_and_cache(rows, rows, both[..., :128], both[..., 128:], meta(tokens, dtype=torch.int64))


def _slots(requests: int) -> None:
    tokens = 3 * requests
    starts, positions = meta(requests + 1, dtype=torch.int32), meta(tokens, dtype=torch.int64)
    cache.compute_slot_mapping(
        starts, positions, meta(1024, 512, dtype=torch.int32), meta(tokens, dtype=torch.int64), 16
    )


def _penalties(requests: int) -> None:
    mask = meta(requests, 151936, dtype=torch.bool)
    logits = meta(requests, 151936, dtype=torch.float32)
    sampling.apply_repetition_penalties(logits, mask, mask, meta(requests, dtype=torch.float32))


def _top_k_top_p(requests: int) -> None:
    logits = meta(requests, 151936, dtype=torch.float32)
    sampling.apply_top_k_top_p(logits, meta(requests, dtype=torch.int32), meta(requests, dtype=torch.float32))


def _quantize(tokens: int, *, converts: bool) -> None:
    with mock.patch.object(quantization, "_has_float8", return_value=converts):
        quantization.per_token_group_quant_fp8(meta(tokens, 4096), 128, 1e-10, True, True)


def _align(tokens: int) -> None:
    moe_align.moe_align_block_size(meta(tokens, 10, dtype=torch.int32), 16, 512)


def _attention(
    requests: int,
    *,
    query_len: int,
    group: int = 4,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    shared: int = 232448,
) -> None:
    """Decodes, or queries of so many tokens, of a model with 8 KV heads, on a device with so much shared memory."""
    tokens = requests * query_len
    query = meta(tokens, (8 * group + 16) * size, dtype=dtype)[:, : 8 * group * size].view(tokens, 8 * group, size)
    cache = meta(1000, 16, 8, 2 * size, dtype=dtype).transpose(1, 2)
    integers = [meta(*shape, dtype=torch.int32) for shape in ((1024, 512), (requests,), (requests + 1,))]
    decodes = requests if query_len == 1 else 0
    output = meta(tokens, 8 * group, size, dtype=dtype)
    with mock.patch.object(paged_attention, "shared_memory", return_value=shared):
        paged_attention.paged_attention(
            query, cache[..., :size], cache[..., size:], *integers, output, 0.1, query_len, decodes
        )


def _encoder(tokens: int, *, size: int = 64, window: int = 0, shared: int = 232448) -> None:
    """Sequences of 16 tokens of an encoder with 12 heads."""
    x = meta(16 * tokens, 36, size)
    with mock.patch.object(paged_attention, "shared_memory", return_value=shared):
        paged_attention.encoder_attention(
            x[:, :12], x[:, 12:24], x[:, 24:], meta(tokens + 1, dtype=torch.int32), meta(16 * tokens, 12, size), 0.1,
            512, window,
        )  # fmt: skip


def _latent(
    requests: int, *, query_len: int, heads: int = 16, shared: int = 232448, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Decodes, or queries of so many tokens, of DeepSeek-V3, whose 128 heads are 16 on each of eight ranks."""
    rows = meta(1000, 64, 576, dtype=dtype)
    integers = [meta(*shape, dtype=torch.int32) for shape in ((1024, 512), (requests,), (requests + 1,))]
    decodes = requests if query_len == 1 else 0
    with mock.patch.object(mla, "shared_memory", return_value=shared):
        query = meta(requests * query_len, heads, 576, dtype=dtype)
        mla.mla_attention(query, rows, *integers, 512, 0.1, query_len, decodes)


def _write_latents(tokens: int) -> None:
    both = meta(tokens, 1536 + 576)
    slots = meta(tokens, dtype=torch.int64)
    mla.concat_and_cache_mla(meta(tokens, 512), both[:, 1536 + 512 :], meta(1000, 64, 576), slots)


def _topk(tokens: int, *, experts: int, biased: bool) -> None:
    outputs = (meta(tokens, 10, dtype=torch.float32), *(meta(tokens, 10, dtype=torch.int32) for _ in range(2)))
    moe_routing.topk_sigmoid(*outputs, meta(tokens, experts), True, meta(experts) if biased else None)


def _grouped_topk(tokens: int) -> None:
    moe_routing.grouped_topk(meta(tokens, 256, dtype=torch.float32), 8, 4, 8, True, 2.5, meta(256), 1)


def _experts(tokens: int, *, shared: int = 232448, dtype: torch.dtype = torch.bfloat16) -> None:
    """Qwen3-30B-A3B on a device with so much shared memory."""
    with mock.patch.object(fused_moe, "shared_memory", return_value=shared):
        fused_moe.fused_experts(
            meta(tokens, 2048, dtype=dtype), meta(128, 1536, 2048, dtype=dtype), meta(128, 2048, 768, dtype=dtype),
            meta(tokens, 8, dtype=torch.float32), meta(tokens, 8, dtype=torch.int32),
        )  # fmt: skip


def _scaled_mm(tokens: int, *, dtype: torch.dtype, by_block: bool) -> None:
    a, b = meta(tokens, 4096, dtype=dtype), meta(6144, 4096, dtype=dtype).t()
    if by_block:
        scale_a, scale_b = meta(32, tokens, dtype=torch.float32).t(), meta(48, 32, dtype=torch.float32).t()
    else:
        scale_a, scale_b = meta(tokens, 1, dtype=torch.float32), meta(1, 6144, dtype=torch.float32)
    quantization.scaled_mm(a, b, scale_a, scale_b, "bfloat16", meta(6144))


def _sequences(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prefills of 16 tokens or more: ranges, slots in a column of the block table, and whether they have a state."""
    count = max(tokens // 16, 1)
    slots = meta(count, 64, dtype=torch.int32)[:, 0]
    return meta(count + 1, dtype=torch.int32), slots, meta(count, dtype=torch.bool)


def _convolve(tokens: int, *, step: bool) -> None:
    """Qwen3-Next."""
    x, weight, states = meta(tokens, 8192), meta(8192, 4), meta(1000, 3, 8192).transpose(1, 2)
    if step:
        causal_conv1d.causal_conv1d_update(x, weight, None, states, meta(tokens, dtype=torch.int32))
    else:
        causal_conv1d.causal_conv1d_fn(x, weight, None, states, *_sequences(tokens))


def _delta_rule(
    tokens: int, *, step: bool, dtype: torch.dtype = torch.bfloat16, state: torch.dtype = torch.float32, **device: int
) -> None:
    """Qwen3-Next, on a device with so much shared memory and so many multiprocessors."""
    parts = meta(tokens, 8192, dtype=dtype).split([2048, 2048, 4096], -1)
    heads = [part.unflatten(-1, (-1, 128)) for part in parts]
    g, beta = meta(tokens, 32, dtype=torch.float32), meta(tokens, 32, dtype=dtype)
    states = meta(1000, 32, 128, 128, dtype=state)
    if step:
        gated_delta_rule.fused_recurrent_gated_delta_rule(*heads, g, beta, states, meta(tokens, dtype=torch.int32))
        return
    with contextlib.ExitStack() as stack:
        for name, value in device.items():
            stack.enter_context(mock.patch.object(gated_delta_chunk, name, return_value=value))
        gated_delta_chunk.chunk_gated_delta_rule(*heads, g, beta, states, *_sequences(tokens))


def _gates(tokens: int) -> None:
    heads = meta(32, dtype=torch.float32)
    gated_delta_rule.fused_gdn_gating(heads, meta(tokens, 32), meta(tokens, 32), heads)


#: Devices with float8_e4m3fn of their own; gfx942 has another float8.
_FLOAT8 = ("sm_90", "sm_100")

#: Devices with as much shared memory as Hopper's.
_LARGE, _SMALL = ("sm_90", "sm_100"), {"shared": 65536}

_HEADS = {"": {}, " wide": {"group": 8, "size": 256}}
_ATTENTION = [
    case
    for name, shape in _HEADS.items()
    for case in (
        Case(f"attention{name} decodes", partial(_attention, query_len=1, **shape), _LARGE, variants=5, tokens=16),
        Case(
            f"attention{name} decodes small",
            partial(_attention, query_len=1, **shape, **_SMALL),
            ("sm_80", "gfx942"),
            variants=5,
        ),
        Case(
            f"attention{name} prefills",
            partial(_attention, query_len=512, **shape),
            _LARGE,
            # Of the tiles that were measured on an H200 the fastest one spills.
            spills={"_attend": {"sm_90": 0, "sm_100": 24} if name else {"sm_90": 144, "sm_100": 152}},
            tokens=8,
        ),
        Case(
            f"attention{name} prefills small",
            partial(_attention, query_len=512, **shape, **_SMALL),
            ("sm_80", "gfx942"),
            tokens=8,
        ),
    )
] + [
    Case("encoder", _encoder, _LARGE, tokens=8),
    Case("encoder small", partial(_encoder, **_SMALL), ("sm_80", "gfx942"), tokens=8),
    Case("encoder window", partial(_encoder, window=64), ("sm_90",), tokens=8),
    Case("attention short", partial(_attention, query_len=4), ("sm_90",), tokens=8),
    Case("attention float32", partial(_attention, query_len=512, dtype=torch.float32, **_HEADS[" wide"]), ("sm_90",)),
]

_LATENT = [
    Case("concat_and_cache_mla", _write_latents),
    Case("mla decodes", partial(_latent, query_len=1), _LARGE, variants=5, tokens=16),
    Case("mla decodes of all heads", partial(_latent, query_len=1, heads=128), ("sm_90",), variants=5, tokens=16),
    Case("mla decodes small", partial(_latent, query_len=1, **_SMALL), ("sm_80", "gfx942"), variants=5, tokens=16),
    Case("mla prefills", partial(_latent, query_len=512), _LARGE, tokens=8),
    Case("mla prefills small", partial(_latent, query_len=512, **_SMALL), ("sm_80", "gfx942"), tokens=8),
    Case("mla float32", partial(_latent, query_len=512, dtype=torch.float32), ("sm_90",), tokens=8),
]

_DELTA_RULE = [
    Case("causal_conv1d_fn", partial(_convolve, step=False)),
    Case("causal_conv1d_update", partial(_convolve, step=True)),
    Case("fused_gdn_gating", _gates),
    Case("fused_recurrent_gated_delta_rule", partial(_delta_rule, step=True)),
    Case("fused_recurrent_gated_delta_rule bfloat16 state", partial(_delta_rule, step=True, state=torch.bfloat16)),
    Case(
        "chunk_gated_delta_rule",
        partial(_delta_rule, step=False),
        _LARGE,
        variants=3,  # wide and narrow parts; a batch of one token has other strides
        # The wide part of a state fills the registers of a multiprocessor of Hopper.
        spills={"_advance": {"sm_100": 8}},
        tokens=4096,
    ),
    Case("chunk_gated_delta_rule narrow", partial(_delta_rule, step=False), _LARGE, variants=3, tokens=16),
    Case(
        "chunk_gated_delta_rule small",
        partial(_delta_rule, step=False, shared_memory=65536),
        ("sm_80", "gfx942"),
        variants=2,
        # Operands of Ampere's products take registers, which those of Hopper and CDNA do not.
        spills={"_prepare": {"sm_80": 160}, "_advance": {"sm_80": 112}},
    ),
    Case("chunk_gated_delta_rule float32", partial(_delta_rule, step=False, dtype=torch.float32), ("sm_90", "gfx942")),
]

CASES: list[Case] = [
    *_ATTENTION,
    *_LATENT,
    *_DELTA_RULE,
    Case("silu_and_mul", lambda t: activation.silu_and_mul(meta(t, 2 * 9728))),
    Case("gelu_and_mul", lambda t: activation.gelu_and_mul(meta(t, 2 * 9728))),
    Case("gelu_and_mul tanh", lambda t: activation.gelu_and_mul(meta(t, 2 * 9728), "tanh")),
    Case("rms_norm", partial(_norm, residual=False)),
    Case("rms_norm residual", partial(_norm, residual=True)),
    Case("rms_norm heads", _heads_norm),
    Case("rms_norm long", lambda t: normalization.rms_norm(meta(t, 20000), meta(t, 20000), meta(20000), 1e-6)),
    Case("gemma_rms_norm", lambda t: normalization.gemma_rms_norm(meta(t, 2048), meta(t, 2048), meta(2048), 1e-6)),
    Case("rms_norm_gated", partial(_gated, group=None)),
    Case("rms_norm_gated groups", partial(_gated, group=512)),
    Case("rotary_embedding", partial(_rotary, rotated=256, neox=True)),
    Case("rotary_embedding partial", partial(_rotary, rotated=64, neox=True)),
    Case("rotary_embedding interleaved", partial(_rotary, rotated=64, neox=False, has_key=False)),
    Case("reshape_and_cache", _write_cache),
    Case("compute_slot_mapping", _slots),
    Case("moe_align_block_size", _align),
    Case("topk_sigmoid", partial(_topk, experts=512, biased=False)),
    Case("topk_sigmoid bias", partial(_topk, experts=1024, biased=True)),
    Case("grouped_topk", _grouped_topk),
    Case("moe_sum", lambda t: moe_sum.moe_sum(meta(t, 8, 2048), meta(t, 2048))),
    Case("fused_experts", _experts, _LARGE, variants=12),
    Case("fused_experts medium", partial(_experts, shared=166912), ("sm_80",), variants=12),
    Case("fused_experts float32", partial(_experts, dtype=torch.float32), ("sm_90",), variants=12),
    Case("fused_experts small", partial(_experts, **_SMALL), ("gfx942",), variants=12),
    Case("apply_repetition_penalties", _penalties),
    Case("apply_top_k_top_p", _top_k_top_p),
    Case("per_token_group_quant_fp8", partial(_quantize, converts=True), targets=_FLOAT8),
    Case("per_token_group_quant_fp8 by bits", partial(_quantize, converts=False)),
    Case("scaled_mm float8", partial(_scaled_mm, dtype=torch.float8_e4m3fn, by_block=False), _FLOAT8, variants=3),
    Case("scaled_mm blocks", partial(_scaled_mm, dtype=torch.float8_e4m3fn, by_block=True), _FLOAT8, variants=3),
    Case("scaled_mm int8", partial(_scaled_mm, dtype=torch.int8, by_block=False), variants=3),
]
#: The other tiles of the same product, on one target: they take the compiler longest.
CASES += [
    replace(case, name=f"{case.name} {tokens}", tokens=tokens, targets=("sm_90",))
    for case in CASES
    for tokens in (8, 4096)
    if case.name.startswith("scaled_mm")
] + [
    replace(case, name=f"{case.name} {tokens}", tokens=tokens, targets=case.targets if tokens == 4096 else ("sm_90",))
    for case in CASES
    for tokens in (1, 64, 512, 4096)
    if case.name == "fused_experts" or (case.name in ("fused_experts medium", "fused_experts small") and tokens == 4096)
]
