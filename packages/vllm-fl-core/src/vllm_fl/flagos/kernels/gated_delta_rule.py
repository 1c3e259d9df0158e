"""One step of the gated delta rule (decode), and the gates of both its forms.

A program takes 32 rows of one state, [Dv, Dk] with Dk contiguous, and reads and writes each entry once. With S the
decayed state, the output is ``S q + beta (v - S k) (k . q)``, so that both products come from the entries as they were
read. A row is laid out as pieces of 128 bytes, which neighbouring lanes read, and its pieces lie in the registers of
one lane: a sum over a row takes three exchanges between lanes where a plain row would take five. Arithmetic is in
float32, the state may have any floating dtype. q, k, v and states need a contiguous last dimension. Any device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

from .common import need_unit_stride, power_of_2, warps_for

_ROWS = 32
_LINE = 128  # bytes
_MOST = 1024  # entries of a key
_GATES = 1024


@triton.jit(do_not_specialize=["numel"])
def _gate(
    rate, a, b, offset, g, beta, numel, heads, rate_head, a_token, a_head, b_token, b_head, offset_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    token, head = at // heads, at % heads
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


@triton.jit(do_not_specialize=["slot_stride"])
def _step(
    q, k, v, g, beta, state, slots, out, scale, key_dim, value_dim,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, b_token, b_head, s_slot, s_head, s_row,
    slot_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, L2NORM: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = (program // (HEADS * TILES)).to(tl.int64)
    head = program // TILES % HEADS
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    row = program % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    in_row, in_column = row < value_dim, column < key_dim
    query = tl.load(q + token * q_token + head // GROUP * q_head + column, mask=in_column, other=0.0).to(tl.float32)
    key = tl.load(k + token * k_token + head // GROUP * k_head + column, mask=in_column, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_token + head * v_head + row, mask=in_row, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + token * g_token + head * g_head).to(tl.float32))
    strength = tl.load(beta + token * b_token + head * b_head).to(tl.float32)
    if L2NORM:
        query *= tl.rsqrt(tl.sum(tl.sum(query * query, 0), 0) + 1e-6)
        key *= tl.rsqrt(tl.sum(tl.sum(key * key, 0), 0) + 1e-6)
    result = tl.zeros((ROWS,), tl.float32)
    if slot > 0:
        at = state + slot * s_slot + head * s_head + row[None, :, None] * s_row + column[:, None, :]
        mask = in_row[None, :, None] & in_column[:, None, :]
        s = tl.load(at, mask=mask, other=0.0).to(tl.float32) * decay
        recalled = tl.sum(tl.sum(s * key[:, None, :], 0), 1)
        read = tl.sum(tl.sum(s * query[:, None, :], 0), 1)
        written = (value - recalled) * strength
        result = (read + written * tl.sum(tl.sum(key * query, 0), 0)) * scale
        s += written[:, None][None, :, :] * key[:, None, :]
        tl.store(at, s.to(state.dtype.element_ty), mask=mask)
    tl.store(out + (token * HEADS + head) * value_dim + row, result.to(out.dtype.element_ty), mask=in_row)


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.gdn.fused_gdn_gating`."""
    g, beta = a.new_empty(a.shape, dtype=float32), b.new_empty(b.shape)
    numel = a.numel()
    if numel:
        _gate[(triton.cdiv(numel, _GATES),)](
            A_log, a, b, dt_bias, g, beta, numel, a.shape[1], A_log.stride(0), *a.stride(), *b.stride(),
            dt_bias.stride(0), BLOCK=_GATES, num_warps=4,
        )  # fmt: skip
    return g, beta


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
) -> Tensor:
    """See :func:`vllm_fl.catalog.gdn.fused_recurrent_gated_delta_rule`."""
    for name, x in (("q", q), ("k", k), ("v", v), ("state", state)):
        need_unit_stride(name, x)
    (tokens, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[1:]
    if key_dim > _MOST:
        raise NotImplementedError(f"keys of {key_dim} entries; at most {_MOST} are kept in registers")
    out = v.new_empty(v.shape)
    if not out.numel():
        return out
    columns = power_of_2(key_dim)
    piece = min(columns, _LINE // state.element_size())
    rows = min(power_of_2(value_dim), _ROWS)
    tiles = triton.cdiv(value_dim, rows)
    _step[(tokens * heads * tiles,)](
        q, k, v, g, beta, state, cache_indices, out, key_dim**-0.5 if scale is None else scale, key_dim, value_dim,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride(), *beta.stride(), *state.stride()[:3],
        cache_indices.stride(0), HEADS=heads, GROUP=heads // key_heads, L2NORM=use_qk_l2norm,
        TILES=tiles, ROWS=rows, PIECES=columns // piece, PIECE=piece,
        num_warps=warps_for(rows * columns, per_warp=1024, most=8),
    )  # fmt: skip
    return out
