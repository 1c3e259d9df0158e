"""The gated delta rule token by token, and the gates of all its forms.

A program takes `rows` rows of one state, [Dv, Dk] with Dk contiguous, and reads and writes each entry once. With S the
decayed state, the output is ``S q + beta (v - S k) (k . q)``, so that both products come from the entries as they were
read. A row is laid out as pieces of 128 bytes, which neighbouring lanes read, and its pieces lie in the registers of
one lane: a sum over a row takes three exchanges between lanes where a plain row would take five. Arithmetic is in
float32, the state may have any floating dtype. q, k, v and states need a contiguous last dimension. Any device.

Decodes have one token each. Prefills come here in float32 only, which matrix instructions would round.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from .common import cdiv, need_unit_stride, power_of_2, warps_for
from .launch import fast
from .planned import planned
from .sequences import bounds

_ROWS = 32
_LINE = 128  # bytes
_MOST = 1024  # entries of a key
_GATES = 128  # each takes a chain of transcendental functions


@fast
@triton.jit(do_not_specialize=["numel"])
def _gate(
    rate, a, b, offset, g, beta, numel, rate_head, a_token, a_head, b_token, b_head, offset_head,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    token, head = (at // HEADS).to(tl.int64), at % HEADS
    x = tl.load(a + token * a_token + head * a_head, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(offset + head * offset_head, mask=mask, other=0.0).to(tl.float32)
    # softplus(x) = max(x, 0) + log(1 + exp(-|x|)); 1 + e loses digits of e, and the quotient gives them back.
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    softplus = tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    scale = tl.exp(tl.load(rate + head * rate_head, mask=mask, other=0.0).to(tl.float32))
    tl.store(g + at, -scale * softplus, mask=mask)
    strength = tl.sigmoid(tl.load(b + token * b_token + head * b_head, mask=mask, other=0.0).to(tl.float32))
    tl.store(beta + at, strength.to(beta.dtype.element_ty), mask=mask)


@triton.jit
def _token(
    q, k, v, g, beta, token, head, row, column, key_dim, value_dim,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, b_token, b_head,
    GROUP: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """Query, key, value, decay and strength of a token, in float32."""
    mask = column < key_dim
    query = tl.load(q + token * q_token + head // GROUP * q_head + column, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(k + token * k_token + head // GROUP * k_head + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_token + head * v_head + row, mask=row < value_dim, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + token * g_token + head * g_head).to(tl.float32))
    strength = tl.load(beta + token * b_token + head * b_head).to(tl.float32)
    if L2NORM:
        query *= tl.rsqrt(tl.sum(tl.sum(query * query, 0), 0) + 1e-6)
        key *= tl.rsqrt(tl.sum(tl.sum(key * key, 0), 0) + 1e-6)
    return query, key, value, decay, strength


@triton.jit
def _write(s, query, key, value, strength):
    """The state [PIECES, ROWS, PIECE] after a token, and what the query reads from it, [ROWS]; `s` has decayed."""
    recalled = tl.sum(tl.sum(s * key[:, None, :], 0), 1)
    read = tl.sum(tl.sum(s * query[:, None, :], 0), 1)
    written = (value - recalled) * strength
    read += written * tl.sum(tl.sum(key * query, 0), 0)
    return s + written[:, None][None, :, :] * key[:, None, :], read


@fast
@triton.jit(do_not_specialize=["slot_stride"])
def _step(
    q, k, v, g, beta, state, slots, out, scale, key_dim, value_dim,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, b_token, b_head, s_slot, s_head, s_row,
    slot_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, L2NORM: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The token of one decode, for one head and ROWS rows of its state."""
    program = tl.program_id(0)
    token, head = (program // (HEADS * TILES)).to(tl.int64), program // TILES % HEADS
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    row = program % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    query, key, value, decay, strength = _token(
        q, k, v, g, beta, token, head, row, column, key_dim, value_dim,
        q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, b_token, b_head, GROUP, L2NORM,
    )  # fmt: skip
    result = tl.zeros((ROWS,), tl.float32)
    if slot > 0:
        at = state + slot * s_slot + head * s_head + row[None, :, None] * s_row + column[:, None, :]
        mask = (row < value_dim)[None, :, None] & (column < key_dim)[:, None, :]
        # A state is needed again a whole step later, when no cache has it any more.
        s = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        s, result = _write(s * decay, query, key, value, strength)
        tl.store(at, s.to(state.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    result_at = out + (token * HEADS + head) * value_dim + row
    tl.store(result_at, (result * scale).to(out.dtype.element_ty), mask=row < value_dim)


@fast
@triton.jit(do_not_specialize=["tokens", "sequences", "slot_stride", "flag_stride"])
def _sequence(
    q, k, v, g, beta, state, starts, slots, flags, out, tokens, sequences, scale, key_dim, value_dim,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, b_token, b_head, s_slot, s_head, s_row,
    slot_stride, flag_stride, HAS_FLAGS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    L2NORM: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """All tokens of one sequence, for one head and ROWS rows of its state."""
    program = tl.program_id(0)
    sequence, head = program // (HEADS * TILES), program // TILES % HEADS
    begin, end, slot = bounds(starts, slots, slot_stride, sequence, sequences, tokens)
    row = program % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    results = out + head * value_dim + row
    s = tl.zeros((PIECES, ROWS, PIECE), tl.float32)
    at = state + slot * s_slot + head * s_head + row[None, :, None] * s_row + column[:, None, :]
    mask = (row < value_dim)[None, :, None] & (column < key_dim)[:, None, :]
    is_real = (slot > 0) & (begin < end)
    if HAS_FLAGS:
        has_state = is_real
        if is_real:
            has_state = tl.load(flags + sequence * flag_stride) != 0
        if has_state:
            s = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for i in range(end - begin):
        token = (begin + i).to(tl.int64)
        result = tl.zeros((ROWS,), tl.float32)
        if slot > 0:
            query, key, value, decay, strength = _token(
                q, k, v, g, beta, token, head, row, column, key_dim, value_dim,
                q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, b_token, b_head, GROUP, L2NORM,
            )  # fmt: skip
            s, result = _write(s * decay, query, key, value, strength)
        result_at = results + token * (HEADS * value_dim)
        tl.store(result_at, (result * scale).to(out.dtype.element_ty), mask=row < value_dim)
    if is_real:
        tl.store(at, s.to(state.dtype.element_ty), mask=mask)


@planned
def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.gdn.fused_gdn_gating`."""
    g, beta = a.new_empty(a.shape, dtype=float32), b.new_empty(b.shape)
    numel = a.numel()
    if numel:
        _gate[(cdiv(numel, _GATES),)](
            A_log, a, b, dt_bias, g, beta, numel, A_log.stride(0), *a.stride(), *b.stride(), dt_bias.stride(0),
            HEADS=a.shape[1], BLOCK=_GATES, num_warps=4,
        )  # fmt: skip
    return g, beta


@planned
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cache_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    *,
    rows: int = _ROWS,
    warps: int | None = None,
) -> Tensor:
    """See :func:`vllm_fl.catalog.gdn.fused_recurrent_gated_delta_rule`."""
    sizes, strides, options = _configure(q, k, v, g, beta, state, use_qk_l2norm, rows, warps)
    out = v.new_empty(v.shape)
    if out.numel():
        _step[(v.shape[0] * v.shape[1] * options["TILES"],)](
            q, k, v, g, beta, state, cache_indices, out, float(q.shape[2] ** -0.5 if scale is None else scale),
            *sizes, *strides, cache_indices.stride(0), **options,
        )  # fmt: skip
    return out


def recurrent_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
) -> Tensor:
    """As :func:`vllm_fl.catalog.gdn.chunk_gated_delta_rule`, one token of each sequence after another."""
    sizes, strides, options = _configure(q, k, v, g, beta, state, use_qk_l2norm, _ROWS, None)
    out = v.new_empty(v.shape)
    sequences, has_flags = cache_indices.shape[0], has_initial_state is not None
    if out.numel():
        _sequence[((sequences + 1) * v.shape[1] * options["TILES"],)](
            q, k, v, g, beta, state, query_start_loc, cache_indices, has_initial_state, out,
            v.shape[0], sequences, scale, *sizes, *strides, cache_indices.stride(0),
            0 if has_initial_state is None else has_initial_state.stride(0), HAS_FLAGS=has_flags, **options,
        )  # fmt: skip
    return out


def _configure(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, l2norm: bool, most: int, warps: int | None
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """Sizes of keys and values, strides, and constants of both kernels, with `most` rows a program.

    Raises:
        NotImplementedError: what they cannot take.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("state", state)):
        need_unit_stride(name, x)
    key_dim, (heads, value_dim) = q.shape[2], v.shape[1:]
    if key_dim > _MOST:
        raise NotImplementedError(f"keys of {key_dim} entries; at most {_MOST} are kept in registers")
    columns = power_of_2(key_dim)
    piece = min(columns, _LINE // state.element_size())
    rows = min(power_of_2(value_dim), most)
    strides = [*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride(), *beta.stride(), *state.stride()[:3]]
    constants = {"HEADS": heads, "GROUP": heads // q.shape[1], "L2NORM": l2norm, "TILES": cdiv(value_dim, rows)}
    layout = {"ROWS": rows, "PIECES": columns // piece, "PIECE": piece}
    warps = warps or warps_for(rows * columns, per_warp=1024, most=8)
    return (key_dim, value_dim), tuple(strides), {**constants, **layout, "num_warps": warps}
