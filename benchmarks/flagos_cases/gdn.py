"""The gated delta net of Qwen3-Next, by operator and by step.

Where vLLM prepares something once a step, such as the list of chunks, that is not part of its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .base import BF16, F32, I32, Case, Lookup, normal, one

KEY_HEADS, HEADS, SIZE = 16, 32, 128
CHANNELS, WIDTH = (2 * KEY_HEADS + HEADS) * SIZE, 4


def slots(device: str, count: int) -> Tensor:
    """Different slots above 0, in no order."""
    return (torch.randperm(count, device=device) + 1).to(I32)


def starts(device: str, lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=I32, device=device)


def lengths_name(lengths: Sequence[int]) -> str:
    return (
        f"{len(lengths)}x{lengths[0]}" if len(set(lengths)) == 1 else f"{len(lengths)} sequences, {sum(lengths)} tokens"
    )


def conv_state(device: str, count: int) -> Tensor:
    return normal(device, count + 1, WIDTH - 1, CHANNELS).transpose(1, 2)


def heads_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N, channels] -> queries and keys [N, Hk, D], values [N, Hv, D]."""
    parts = x.split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, HEADS * SIZE], -1)
    q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in parts)
    return q, k, v


def gate_args(device: str, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A_log, a, b, dt_bias."""
    rate = torch.empty(HEADS, device=device).uniform_(0, 2.7)
    return rate, normal(device, tokens, HEADS), normal(device, tokens, HEADS), normal(device, HEADS)


def delta_args(device: str, tokens: int, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and the states; neighbouring keys are alike, as in trained models."""
    x = normal(device, tokens, CHANNELS)
    q, k, v = heads_of(x)
    k += normal(device, 1, KEY_HEADS, SIZE)
    g = -(torch.rand(tokens, HEADS, device=device) ** 4) * 8
    beta = torch.rand(tokens, HEADS, device=device).to(BF16)
    return q, k, v, g, beta, normal(device, count + 1, HEADS, SIZE, SIZE, dtype=dtype, scale=0.3)


def vllm_conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, indices: Tensor
) -> Callable[[], Tensor]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    # It writes its result over its input.
    return lambda: causal_conv1d_update(x, states, weight, bias, "silu", conv_state_indices=indices)


def vllm_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, begin: Tensor, indices: Tensor, flags: Tensor
) -> Callable[[], Tensor]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    blocks, batch, offsets = compute_causal_conv1d_metadata(begin.cpu(), device=begin.device)
    metadata = SimpleNamespace(nums_dict=blocks, batch_ptr=batch, token_chunk_offset_ptr=offsets)
    return lambda: causal_conv1d_fn(
        x.t(), weight, bias, activation="silu", conv_states=states, has_initial_state=flags, cache_indices=indices,
        query_start_loc=begin, metadata=metadata,
    ).t()  # fmt: skip


def vllm_gate(rate: Tensor, a: Tensor, b: Tensor, offset: Tensor) -> Callable[[], Any]:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import fused_gdn_gating

    return lambda: fused_gdn_gating(rate, a, b, offset)


def vllm_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, indices: Tensor
) -> Callable[[], Tensor]:
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule

    count = len(indices)
    rows = torch.arange(count + 1, dtype=I32, device=indices.device)
    given = [x.contiguous()[None] for x in (q, k, v, g, beta)]
    return lambda: fused_recurrent_gated_delta_rule(
        *given, initial_state=state, inplace_final_state=True, cu_seqlens=rows, ssm_state_indices=indices,
        use_qk_l2norm_in_kernel=True,
    )[0]  # fmt: skip


def _vllm_chunk(begin: Tensor, indices: Tensor, flags: Tensor, state: Tensor) -> Callable[..., Tensor]:
    from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices, prepare_chunk_offsets

    device, host = begin.device, begin.cpu()
    lists = {
        "chunk_indices": prepare_chunk_indices(host, 64).to(device),
        "chunk_offsets": prepare_chunk_offsets(host, 64).to(device),
    }
    rows, empty = indices.long(), ~flags

    def call(*inputs: Tensor, l2norm: bool) -> Tensor:
        before = state[rows].masked_fill_(empty[:, None, None, None], 0)
        out, after = chunk_gated_delta_rule(
            *inputs, initial_state=before, output_final_state=True, cu_seqlens=begin, use_qk_l2norm_in_kernel=l2norm,
            **lists,
        )  # fmt: skip
        state[rows] = after.to(state.dtype)
        return out

    return call


def vllm_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, begin: Tensor, indices: Tensor,
    flags: Tensor,
) -> Callable[[], Tensor]:  # fmt: skip
    call = _vllm_chunk(begin, indices, flags, state)
    given = [x.contiguous()[None] for x in (q, k, v, g, beta)]
    return lambda: call(*given, l2norm=True)


def vllm_decode(
    x: Tensor, weight: Tensor, states: Tensor, state: Tensor, indices: Tensor, rate: Tensor, a: Tensor, b: Tensor,
    offset: Tensor,
) -> Callable[[], Tensor]:  # fmt: skip
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode

    convolve = vllm_conv_update(x, weight, None, states, indices)
    out = x.new_empty(len(x), 1, HEADS, SIZE)

    def call() -> Tensor:
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=convolve(), a=a, b=b, A_log=rate, dt_bias=offset, scale=SIZE**-0.5, initial_state=state, out=out,
            ssm_state_indices=indices, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out

    return call


def vllm_prefill(
    x: Tensor, weight: Tensor, states: Tensor, state: Tensor, begin: Tensor, indices: Tensor, flags: Tensor,
    rate: Tensor, a: Tensor, b: Tensor, offset: Tensor,
) -> Callable[[], Tensor]:  # fmt: skip
    from vllm.third_party.flash_linear_attention.ops import fused_post_conv_prep

    convolve, chunk = (
        vllm_conv(x, weight, None, states, begin, indices, flags),
        _vllm_chunk(begin, indices, flags, state),
    )

    def call() -> Tensor:
        prepared = fused_post_conv_prep(convolve(), a, b, rate, offset, KEY_HEADS, SIZE, SIZE)
        return chunk(*(part[None] for part in prepared), l2norm=False)

    return call


def decode_step(ops: Lookup, given: tuple[Any, ...]) -> Tensor:
    """What the layer does with decodes, between its projections."""
    x, weight, states, state, indices, *gates = given
    g, beta = ops("fused_gdn_gating")(*gates)
    q, k, v = heads_of(ops("causal_conv1d_update")(x, weight, None, states, indices))
    return ops("fused_recurrent_gated_delta_rule")(q, k, v, g, beta, state, indices)


def prefill_step(ops: Lookup, given: tuple[Any, ...]) -> Tensor:
    """What the layer does with prefills, between its projections."""
    x, weight, states, state, begin, indices, flags, *gates = given
    g, beta = ops("fused_gdn_gating")(*gates)
    q, k, v = heads_of(ops("causal_conv1d_fn")(x, weight, None, states, begin, indices, flags))
    return ops("chunk_gated_delta_rule")(q, k, v, g, beta, state, begin, indices, flags)


def gated_delta_net() -> Iterator[Case]:
    weight_shape = (CHANNELS, WIDTH)
    update = ("fused_gdn_gating", "causal_conv1d_update", "fused_recurrent_gated_delta_rule")
    prefill = ("fused_gdn_gating", "causal_conv1d_fn", "chunk_gated_delta_rule")
    for n in (1, 64, 256):

        def conv_args(device: str, n: int = n) -> tuple[Any, ...]:
            x, weight = normal(device, n, CHANNELS), normal(device, *weight_shape, scale=0.5)
            return x, weight, None, conv_state(device, n), slots(device, n)

        def step_args(device: str, n: int = n) -> tuple[Any, ...]:
            x, weight, _, states, indices = conv_args(device, n)
            state = normal(device, n + 1, HEADS, SIZE, SIZE, dtype=F32, scale=0.3)
            return x, weight, states, state, indices, *gate_args(device, n)

        yield one("causal_conv1d_update", f"{n}", conv_args, vllm_conv_update)
        yield one("fused_gdn_gating", f"{n}", lambda device, n=n: gate_args(device, n), vllm_gate)
        for dtype, kind in ((F32, "float32 state"), (BF16, "bfloat16 state")):
            yield one(
                "fused_recurrent_gated_delta_rule", f"{n}, {kind}",
                lambda device, n=n, dtype=dtype: (*delta_args(device, n, n, dtype), slots(device, n)),
                vllm_recurrent, BF16,
            )  # fmt: skip
        yield Case("decode step", f"{n}", step_args, decode_step, update, vllm_decode, BF16)
    for lengths in ([512] * 16, [4096] * 4, [8192], [1 + 37 * i for i in range(24)]):
        name = lengths_name(lengths)

        def sequences(device: str, lengths: Sequence[int] = lengths) -> tuple[Tensor, Tensor, Tensor]:
            flags = torch.arange(len(lengths), device=device) % 2 == 1
            return starts(device, lengths), slots(device, len(lengths)), flags

        def long_conv_args(device: str, lengths: Sequence[int] = lengths) -> tuple[Any, ...]:
            x, weight = normal(device, sum(lengths), CHANNELS), normal(device, *weight_shape, scale=0.5)
            return x, weight, None, conv_state(device, len(lengths)), *sequences(device, lengths)

        def chunk_args(device: str, lengths: Sequence[int] = lengths) -> tuple[Any, ...]:
            return (*delta_args(device, sum(lengths), len(lengths), F32), *sequences(device, lengths))

        def prefill_args(device: str, lengths: Sequence[int] = lengths) -> tuple[Any, ...]:
            x, weight, _, states, *rest = long_conv_args(device, lengths)
            state = normal(device, len(lengths) + 1, HEADS, SIZE, SIZE, dtype=F32, scale=0.3)
            return x, weight, states, state, *rest, *gate_args(device, len(x))

        yield one("causal_conv1d_fn", name, long_conv_args, vllm_conv)
        yield one("chunk_gated_delta_rule", name, chunk_args, vllm_chunk, BF16)
        yield Case("prefill step", name, prefill_args, prefill_step, prefill, vllm_prefill, BF16)
