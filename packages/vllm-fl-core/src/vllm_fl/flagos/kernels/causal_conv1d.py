"""The short causal convolution of gated delta networks over packed sequences, and one step of it.

A program takes 16 tokens of one sequence and 256 channels. Every tap is a load of its own, of rows that the first one
brought into the cache. The program of a sequence's first tokens is the only one that reads the sequence's state, and so
the one that writes it. Products and sums are in float32. States may have any strides, `x` needs contiguous channels.
Any device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .common import cdiv, need_unit_stride, power_of_2
from .launch import fast
from .planned import planned
from .sequences import SEQUENCES, bounds, locate, need_unit_starts

_TOKENS, _CHANNELS, _STEP_CHANNELS = 16, 256, 512
_WARPS = 4
_ACTIVATIONS = {"silu": True, "swish": True, None: False}


@triton.jit
def _finish(y, bias, channel, inside, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = activate(y, "silu")
    return y


@fast
@triton.jit(do_not_specialize=["tokens", "sequences", "slot_stride", "flag_stride"])
def _convolve(
    x, weight, bias, states, starts, slots, flags, out, tokens, sequences, channels,
    x_token, w_channel, w_tap, s_slot, s_channel, s_tap, slot_stride, flag_stride,
    WIDTH: tl.constexpr, PAST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FLAGS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, number = locate(starts, tl.program_id(0), sequences, tokens, TOKENS, BLOCK)
    if sequence <= sequences:
        begin, end, slot = bounds(starts, slots, slot_stride, sequence, sequences, tokens)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        token = begin + number * TOKENS + tl.arange(0, TOKENS)
        row = x + channel[None, :]
        mask = (token < end)[:, None] & inside[None, :]
        y = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if slot > 0:
            state = states + slot * s_slot + channel[None, :] * s_channel
            has_state = False
            if HAS_FLAGS:
                has_state = tl.load(flags + sequence * flag_stride) != 0
            for tap in tl.static_range(WIDTH):
                source = token - (WIDTH - 1 - tap)
                taken = tl.load(
                    row + source.to(tl.int64)[:, None] * x_token, mask=mask & (source >= begin)[:, None], other=0.0
                ).to(tl.float32)
                if has_state & (number == 0):
                    column = (source - begin + WIDTH - 1)[:, None]
                    in_state = inside[None, :] & (column < WIDTH - 1)
                    taken += tl.load(state + column * s_tap, mask=mask & in_state, other=0.0).to(tl.float32)
                scale = tl.load(weight + channel * w_channel + tap * w_tap, mask=inside, other=0.0).to(tl.float32)
                y += taken * scale[None, :]
            y = _finish(y, bias, channel[None, :], inside[None, :], HAS_BIAS, SILU)
            if (number == 0) & (end > begin):
                last_column = tl.arange(0, PAST)[:, None]
                kept = inside[None, :] & (last_column < WIDTH - 1)
                newest = end - (WIDTH - 1) + last_column
                new = tl.load(row + newest.to(tl.int64) * x_token, mask=kept & (newest >= begin), other=0.0)
                new = new.to(tl.float32)
                if has_state:
                    old = state + (newest - begin + WIDTH - 1) * s_tap
                    new += tl.load(old, mask=kept & (newest < begin), other=0.0).to(tl.float32)
                tl.debug_barrier()  # every thread has read the state
                tl.store(state + last_column * s_tap, new.to(states.dtype.element_ty), mask=kept)
        at = token.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@fast
@triton.jit(do_not_specialize=["slot_stride"])
def _step(
    x, weight, bias, states, slots, out, channels, x_token, w_channel, w_tap, s_slot, s_channel, s_tap, slot_stride,
    WIDTH: tl.constexpr, PAST: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    newest = tl.load(x + token * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    y = tl.zeros((CHANNELS,), tl.float32)
    if slot > 0:
        state = states + slot * s_slot + channel * s_channel
        scales = weight + channel * w_channel
        for tap in tl.static_range(WIDTH - 1):
            taken = tl.load(state + tap * s_tap, mask=inside, other=0.0).to(tl.float32)
            y += taken * tl.load(scales + tap * w_tap, mask=inside, other=0.0).to(tl.float32)
        y += newest * tl.load(scales + (WIDTH - 1) * w_tap, mask=inside, other=0.0).to(tl.float32)
        y = _finish(y, bias, channel, inside, HAS_BIAS, SILU)
        column = tl.arange(0, PAST)[:, None]
        at = state[None, :] + column * s_tap
        later = tl.load(at + s_tap, mask=inside[None, :] & (column < WIDTH - 2), other=0.0).to(tl.float32)
        new = tl.where(column == WIDTH - 2, newest[None, :], later)
        tl.debug_barrier()  # every thread has read the state
        tl.store(at, new.to(states.dtype.element_ty), mask=inside[None, :] & (column < WIDTH - 1))
    tl.store(out + token * channels + channel, y.to(out.dtype.element_ty), mask=inside)


@planned
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None = "silu",
) -> Tensor:
    """See :func:`vllm_fl.catalog.gdn.causal_conv1d_fn`."""
    silu = _check(x, weight, bias, activation)
    need_unit_starts(query_start_loc)
    (tokens, channels), sequences = x.shape, cache_indices.shape[0]
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    per_program = min(power_of_2(channels), _CHANNELS)
    _convolve[(tokens // _TOKENS + sequences + 1, cdiv(channels, per_program))](
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, out,
        tokens, sequences, channels, x.stride(0), *weight.stride(), *conv_states.stride(),
        cache_indices.stride(0), 0 if has_initial_state is None else has_initial_state.stride(0),
        **_shape(weight), HAS_BIAS=bias is not None, HAS_FLAGS=has_initial_state is not None, SILU=silu,
        TOKENS=_TOKENS, CHANNELS=per_program, BLOCK=SEQUENCES, num_warps=_WARPS,
    )  # fmt: skip
    return out


@planned
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    cache_indices: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """See :func:`vllm_fl.catalog.gdn.causal_conv1d_update`."""
    silu = _check(x, weight, bias, activation)
    tokens, channels = x.shape
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    per_program = min(power_of_2(channels), _STEP_CHANNELS)
    _step[(tokens, cdiv(channels, per_program))](
        x, weight, bias, conv_states, cache_indices, out, channels, x.stride(0), *weight.stride(),
        *conv_states.stride(), cache_indices.stride(0), **_shape(weight), HAS_BIAS=bias is not None, SILU=silu,
        CHANNELS=per_program, num_warps=_WARPS,
    )  # fmt: skip
    return out


def _shape(weight: Tensor) -> dict[str, int]:
    width = weight.shape[1]
    return {"WIDTH": width, "PAST": power_of_2(width - 1)}


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    """Whether the result goes through silu.

    Raises:
        NotImplementedError: what the kernels cannot take.
    """
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"activation: {activation!r} is not one of silu, swish, None")
    if not 2 <= weight.shape[1] <= _TOKENS:
        raise NotImplementedError(f"weight: a window of {weight.shape[1]}; it must be 2 to {_TOKENS}")
    need_unit_stride("x", x)
    if bias is not None:
        need_unit_stride("bias", bias)
    return _ACTIVATIONS[activation]
