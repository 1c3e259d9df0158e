"""The short causal convolution of gated delta networks over packed sequences, and one step of it.

A program takes 16 tokens of one sequence and 256 channels, and keeps the window of its channels in registers. The
program of a sequence's first tokens is the only one that reads the sequence's state, and so the one that writes it.
Products and sums are in float32. States may have any strides, `x` needs contiguous channels. Any device.
"""

# Tuples grow in Triton code.
# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .common import cdiv, need_unit_stride, power_of_2
from .launch import fast
from .planned import planned
from .sequences import SEQUENCES, bounds, locate, need_unit_starts

_TOKENS, _CHANNELS = 16, 256
_WARPS = 4
_ACTIVATIONS = {"silu": True, "swish": True, None: False}


@triton.jit
def _finish(y, bias, channel, inside, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = activate(y, "silu")
    return y


@triton.jit
def _weights(weight, channel, inside, w_channel, w_tap, WIDTH: tl.constexpr):
    """A vector of float32 for each tap."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(weight + channel * w_channel + tap * w_tap, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _where(condition, channel, channels):
    """Which channels there are, if a scalar condition holds. Triton's interpreter has no `&` of vector and scalar."""
    return channel < tl.where(condition, channels, 0)


@triton.jit
def _past(rows, state, in_state, token, begin, x_token, s_tap, channel, channels, has_state):
    """A token of a sequence that begins at `begin`, in float32; one before it is column `in_state` of the state."""
    is_there = _where(token >= begin, channel, channels)
    was_there = _where(has_state & (token < begin), channel, channels)
    x = tl.load(rows + token.to(tl.int64) * x_token, mask=is_there, other=0.0).to(tl.float32)
    return x + tl.load(state + in_state * s_tap, mask=was_there, other=0.0).to(tl.float32)


@triton.jit
def _sum_of_products(window, taps, WIDTH: tl.constexpr):
    y = window[0] * taps[0]
    for tap in tl.static_range(1, WIDTH):
        y += window[tap] * taps[tap]
    return y


@fast
@triton.jit(do_not_specialize=["tokens", "sequences", "slot_stride", "flag_stride"])
def _convolve(
    x, weight, bias, states, starts, slots, flags, out, tokens, sequences, channels,
    x_token, w_channel, w_tap, s_slot, s_channel, s_tap, slot_stride, flag_stride,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FLAGS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, number = locate(starts, tl.program_id(0), sequences, tokens, TOKENS, BLOCK)
    if sequence <= sequences:
        begin, end, slot = bounds(starts, slots, slot_stride, sequence, sequences, tokens)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        first = begin + number * TOKENS
        rows, results = x + channel, out + first.to(tl.int64) * channels + channel
        if slot > 0:
            state = states + slot * s_slot + channel * s_channel
            has_state = number < 0
            if HAS_FLAGS:
                has_state = tl.load(flags + sequence * flag_stride).to(tl.int32) != 0
            taps = _weights(weight, channel, inside, w_channel, w_tap, WIDTH)
            window = ()
            for past in tl.static_range(WIDTH - 1):
                token = first - (WIDTH - 1 - past)
                window += (_past(rows, state, past, token, begin, x_token, s_tap, channel, channels, has_state),)
            new = ()  # all loads come before the first store, which they would wait for
            for later in tl.static_range(TOKENS):
                is_there = _where(first + later < end, channel, channels)
                new += (tl.load(rows + (first + later).to(tl.int64) * x_token, mask=is_there, other=0.0),)
            for later in tl.static_range(TOKENS):
                window += (new[later].to(tl.float32),)
                y = _finish(_sum_of_products(window, taps, WIDTH), bias, channel, inside, HAS_BIAS, SILU)
                is_there = _where(first + later < end, channel, channels)
                tl.store(results + later * channels, y.to(out.dtype.element_ty), mask=is_there)
                window = window[1:]
            if (number == 0) & (end > begin):
                # Each entry is written by the thread that reads those behind it.
                for past in tl.static_range(WIDTH - 1):
                    token = end - (WIDTH - 1 - past)
                    in_state = token - begin + WIDTH - 1
                    kept = _past(rows, state, in_state, token, begin, x_token, s_tap, channel, channels, has_state)
                    tl.store(state + past * s_tap, kept.to(states.dtype.element_ty), mask=inside)
        else:
            nothing = tl.zeros((CHANNELS,), out.dtype.element_ty)
            for later in tl.static_range(TOKENS):
                is_there = _where(first + later < end, channel, channels)
                tl.store(results + later * channels, nothing, mask=is_there)


@fast
@triton.jit(do_not_specialize=["slot_stride"])
def _step(
    x, weight, bias, states, slots, out, channels, x_token, w_channel, w_tap, s_slot, s_channel, s_tap, slot_stride,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    newest = tl.load(x + token * x_token + channel, mask=inside, other=0.0)
    taps = _weights(weight, channel, inside, w_channel, w_tap, WIDTH)
    y = tl.zeros((CHANNELS,), tl.float32)
    if slot > 0:
        state = states + slot * s_slot + channel * s_channel
        window = ()
        for past in tl.static_range(WIDTH - 1):
            window += (tl.load(state + past * s_tap, mask=inside, other=0.0).to(tl.float32),)
        window += (newest.to(tl.float32),)
        for past in tl.static_range(WIDTH - 1):
            tl.store(state + past * s_tap, window[past + 1].to(states.dtype.element_ty), mask=inside)
        y = _finish(_sum_of_products(window, taps, WIDTH), bias, channel, inside, HAS_BIAS, SILU)
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
        WIDTH=weight.shape[1], HAS_BIAS=bias is not None, HAS_FLAGS=has_initial_state is not None, SILU=silu,
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
    per_program = min(power_of_2(channels), _CHANNELS)
    _step[(tokens, cdiv(channels, per_program))](
        x, weight, bias, conv_states, cache_indices, out, channels, x.stride(0), *weight.stride(),
        *conv_states.stride(), cache_indices.stride(0), WIDTH=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu,
        CHANNELS=per_program, num_warps=_WARPS,
    )  # fmt: skip
    return out


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
