"""The gated delta rule over packed sequences (prefill), in chunks of 64 tokens and two launches.

With b the running sum of g inside a chunk, S the state before it, and rows i, j of the chunk::

    A[i, j] = beta_i exp(b_i - b_j) (k_i . k_j)             for j < i
    U = (1 + A)^-1 beta (V - exp(b) K S^T)                  row i of U is what token i writes
    O = exp(b) Q S^T + [exp(b_i - b_j) (q_i . k_j)] U       for j <= i
    S <- exp(b_C) S + (exp(b_C - b) U)^T K

(Yang et al., "Gated Delta Networks", 2024, whose auxiliary W and U are this U before S is known.) The first kernel is
parallel over all chunks: it computes both matrices of [64, 64], of which it inverts 1 + A, and the scales of rows. The
second takes the chunks of a sequence one after another, in parallel over sequences, heads and parts of Dv, and keeps
its part of S in registers. Neither U nor a state between chunks goes to memory, and keys and queries are read as they
are: their norms are among the row scales.

The inverse grows from blocks of one entry by block inversion; a series in powers of A would have huge terms where keys
are alike. Products take the activations' dtype, those of the inverse float16 where keys are normalised and else
float32, and add in float32; state and scales are float32. float32 activations go token by token, and so do heads that
do not begin at multiples of 16 entries. q, k, v and states need a contiguous last dimension. Any device with matrix
products; the parts are chosen for Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

from .common import cdiv, multiprocessors, need_unit_stride, power_of_2, shared_memory
from .gated_delta_rule import recurrent_prefill
from .launch import fast
from .sequences import SEQUENCES, bounds, locate, need_unit_starts, pieces_before

CHUNK = 64
_WIDE, _NARROW = 64, 32  # rows of a state that a program of the second kernel takes
_LARGE = 192 * 1024  # bytes of shared memory, for wide parts or long keys and two chunks at a time
_LONG, _SHORT = 256, 128  # entries of a key, with so much and with less
_SCALES = 4  # rows a chunk: factors of K S^T, of Q S^T, and of U on its way into S; then exp(b_C) everywhere


@triton.jit
def _inverse(a, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRODUCT: tl.constexpr):
    """The inverse of 1 + `a`, for a strictly lower triangular `a` of [SIZE, SIZE], float32; SIZE is 2**LEVELS.

    The diagonal blocks of size 1, 2, 4, ... are inverted in turn:
    ``[[D, 0], [E, F]]^-1 = [[D^-1, 0], [-F^-1 E D^-1, F^-1]]``, for all pairs of neighbouring blocks in one product.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x = tl.where(row == column, 1.0, tl.where((row ^ column) == 1, -a, 0.0))
    a = a.to(PRODUCT)
    for level in range(1, LEVELS):
        # Where the numbers of the blocks of 2**level differ in the last bit: in E, and opposite, where `a` is 0.
        below = tl.where(((row >> level) ^ (column >> level)) == 1, a, 0.0)
        known = x.to(PRODUCT)
        left = tl.dot(known, below).to(PRODUCT)
        x -= tl.dot(left, known)
    return x


@triton.jit
def _rows(x, first, rows, width, STRIDE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `first` to `first` + SIZE - 1 of a matrix, of which `rows` exist, as [SIZE, WIDTH]."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    # With a constant stride all entries of a thread are at constant distances, and take one register for addresses.
    at = x + first.to(tl.int64) * STRIDE + (row * STRIDE + column)
    return tl.load(at, mask=(row < rows) & (column < width), other=0.0)


@fast
@triton.jit(do_not_specialize=["tokens", "sequences", "slot_stride"])
def _prepare(
    q, k, g, beta, starts, slots, systems, pairs, scales, tokens, sequences, scale,
    q_head, k_head, g_token, g_head, b_token, b_head, slot_stride,
    Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, KEY_DIM: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, L2NORM: tl.constexpr,
    PRODUCT: tl.constexpr, KEY: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head."""
    piece, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sequence, number = locate(starts, piece, sequences, tokens, SIZE, SEQUENCES)
    if sequence < sequences:
        begin, end, slot = bounds(starts, slots, slot_stride, sequence, sequences, tokens)
        if slot > 0:
            first = begin + number * SIZE
            rows = end - first
            i = tl.arange(0, SIZE)
            token = (first + i).to(tl.int64)
            decay = tl.load(g + token * g_token + head * g_head, mask=i < rows, other=0.0).to(tl.float32)
            strength = tl.load(beta + token * b_token + head * b_head, mask=i < rows, other=0.0).to(tl.float32)
            key = _rows(k + head // GROUP * k_head, first, rows, KEY_DIM, K_TOKEN, SIZE, KEY)
            query = _rows(q + head // GROUP * q_head, first, rows, KEY_DIM, Q_TOKEN, SIZE, KEY).to(key.dtype)
            query_scale = tl.zeros((SIZE,), tl.float32) + scale
            if L2NORM:
                wide = query.to(tl.float32)
                query_scale *= tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
            earlier = i[:, None] > i[None, :]
            since_start = tl.cumsum(decay, 0)
            until_end = tl.sum(decay, 0) - since_start
            between = since_start[:, None] - since_start[None, :]
            alike = tl.dot(key, tl.trans(key))
            key_scale = tl.full((SIZE,), 1.0, tl.float32)
            if L2NORM:
                key_scale *= tl.rsqrt(tl.sum(tl.where(i[:, None] == i[None, :], alike, 0.0), 1) + 1e-6)

            item = piece.to(tl.int64) * HEADS + head
            row = scales + item * (4 * SIZE) + i
            tl.store(row, tl.exp(since_start) * key_scale)
            tl.store(row + SIZE, tl.exp(since_start) * query_scale)
            tl.store(row + 2 * SIZE, tl.exp(until_end) * key_scale)
            tl.store(row + 3 * SIZE, tl.zeros((SIZE,), tl.float32) + tl.exp(tl.sum(decay, 0)))
            weight = tl.exp(tl.where(i[:, None] >= i[None, :], between, float("-inf"))) * key_scale[None, :]
            square = i[:, None] * SIZE + i[None, :]
            alike = tl.where(earlier, alike * (key_scale * strength)[:, None] * weight, 0.0)
            asked = tl.dot(query, tl.trans(key)) * query_scale[:, None] * weight
            tl.store(pairs + item * (SIZE * SIZE) + square, asked.to(pairs.dtype.element_ty))
            system = _inverse(alike, SIZE, LEVELS, PRODUCT) * strength[None, :]
            tl.store(systems + item * (SIZE * SIZE) + square, system.to(systems.dtype.element_ty))


@fast
@triton.jit(do_not_specialize=["tokens", "sequences", "slot_stride", "flag_stride"])
def _advance(
    q, k, v, state, starts, slots, flags, systems, pairs, scales, out, tokens, sequences,
    q_head, k_head, v_head, s_slot, s_head, slot_stride, flag_stride,
    Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    S_ROW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, HAS_FLAGS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, SIZE: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence, for one head and VALUE rows of its state, which is kept as [KEY, VALUE]."""
    program = tl.program_id(0)
    sequence, head = program // (HEADS * TILES), program // TILES % HEADS
    begin, end, slot = bounds(starts, slots, slot_stride, sequence, sequences, tokens)
    tile = program % TILES * VALUE
    i, column, row = tl.arange(0, SIZE), tl.arange(0, KEY), tl.arange(0, VALUE)
    in_row, in_column = row < VALUE_DIM - tile, column < KEY_DIM
    results = out + head * VALUE_DIM + tile
    offsets = i[:, None] * (HEADS * VALUE_DIM) + row[None, :]
    if slot <= 0:
        for number in range(tl.cdiv(end - begin, SIZE)):
            first = begin + number * SIZE
            result = results + first.to(tl.int64) * (HEADS * VALUE_DIM) + offsets
            mask = (i < end - first)[:, None] & in_row[None, :]
            tl.store(result, tl.zeros((SIZE, VALUE), out.dtype.element_ty), mask=mask)
    elif begin < end:
        state_at = state + slot * s_slot + head * s_head + tile * S_ROW + (row[None, :] * S_ROW + column[:, None])
        in_state = in_column[:, None] & in_row[None, :]
        s = tl.zeros((KEY, VALUE), tl.float32)
        has_state = False
        if HAS_FLAGS:
            has_state = tl.load(flags + sequence * flag_stride) != 0
        if has_state:
            s = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)
        item = pieces_before(starts, sequence, SIZE, SEQUENCES).to(tl.int64) * HEADS + head
        square = i[:, None] * SIZE + i[None, :]
        for number in range(tl.cdiv(end - begin, SIZE)):
            first = begin + number * SIZE
            rows = end - first
            key = _rows(k + head // GROUP * k_head, first, rows, KEY_DIM, K_TOKEN, SIZE, KEY)
            query = _rows(q + head // GROUP * q_head, first, rows, KEY_DIM, Q_TOKEN, SIZE, KEY).to(key.dtype)
            value = _rows(v + head * v_head + tile, first, rows, VALUE_DIM - tile, V_TOKEN, SIZE, VALUE)
            system = tl.load(systems + item * (SIZE * SIZE) + square)
            pair = tl.load(pairs + item * (SIZE * SIZE) + square)
            scale = scales + item * (4 * SIZE)
            before = s.to(key.dtype)
            recalled = tl.dot(key, before) * tl.load(scale + i)[:, None]
            missing = (value.to(tl.float32) - recalled).to(key.dtype)
            written = tl.dot(system, missing)
            kept = (written * tl.load(scale + 2 * SIZE + i)[:, None]).to(key.dtype)
            s = tl.dot(tl.trans(key), kept, s * tl.load(scale + 3 * SIZE))
            read = tl.dot(query, before) * tl.load(scale + SIZE + i)[:, None]
            read = tl.dot(pair, written.to(key.dtype), read)
            result = results + first.to(tl.int64) * (HEADS * VALUE_DIM) + offsets
            tl.store(result, read.to(out.dtype.element_ty), mask=(i < rows)[:, None] & in_row[None, :])
            item += HEADS
        tl.store(state_at, s.to(state.dtype.element_ty), mask=in_state)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> Tensor:
    """See :func:`vllm_fl.catalog.gdn.chunk_gated_delta_rule`."""
    need_unit_starts(query_start_loc)
    scale = float(q.shape[2] ** -0.5 if scale is None else scale)
    in_chunks = k.element_size() == 2 and _loads_in_parts(q) and _loads_in_parts(k)
    run = chunked_prefill if in_chunks else recurrent_prefill
    return run(q, k, v, g, beta, state, query_start_loc, cache_indices, has_initial_state, scale, use_qk_l2norm)


def _loads_in_parts(x: Tensor) -> bool:
    """Whether a thread can load several entries of `x` [T, H, D] at once, wherever a head of a token begins.

    Otherwise Triton 3.6 compiled chunks into wrong results on Hopper (heads of 17 or 18 entries, rows from 16 on).
    """
    return x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 and x.data_ptr() % 16 == 0


def chunked_prefill(
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
    """As :func:`vllm_fl.catalog.gdn.chunk_gated_delta_rule`, with both kernels of this module."""
    for name, x in (("q", q), ("k", k), ("v", v), ("state", state)):
        need_unit_stride(name, x)
    (tokens, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[1:]
    is_large = shared_memory(v.device) > _LARGE
    most = _LONG if is_large else _SHORT
    if key_dim > most:
        raise NotImplementedError(f"keys of {key_dim} entries; on this device chunks take at most {most}")
    out = v.new_empty(v.shape)
    if not out.numel():
        return out
    sequences, pieces = cache_indices.shape[0], tokens // CHUNK + cache_indices.shape[0]
    systems, pairs = k.new_empty((2, pieces, heads, CHUNK, CHUNK)).unbind(0)
    scales = k.new_empty((pieces, heads, _SCALES, CHUNK), dtype=float32)
    shared = {
        "KEY": max(power_of_2(key_dim), 16), "GROUP": heads // key_heads,
        "Q_TOKEN": q.stride(0), "K_TOKEN": k.stride(0), "KEY_DIM": key_dim, "HEADS": heads,
        "SIZE": CHUNK, "SEQUENCES": SEQUENCES, "num_warps": 4,
    }  # fmt: skip
    # The inverse of normalised keys is small enough for float16, which has three more bits than bfloat16.
    product = tl.float16 if k.element_size() == 2 and use_qk_l2norm else tl.float32
    if pieces:
        _prepare[(pieces * heads,)](
            q, k, g, beta, query_start_loc, cache_indices, systems, pairs, scales, tokens, sequences,
            scale, q.stride(1), k.stride(1), *g.stride(), *beta.stride(),
            cache_indices.stride(0), L2NORM=use_qk_l2norm,
            PRODUCT=product, LEVELS=CHUNK.bit_length() - 1, num_stages=1, **shared,
        )  # fmt: skip
    # Wide parts read the chunks less often; narrow ones are needed where wide ones would leave multiprocessors idle.
    fills = sequences * heads * cdiv(value_dim, _WIDE) >= multiprocessors(v.device)
    widest = _WIDE if fills and is_large and key_dim <= _SHORT else _NARROW
    rows = max(min(power_of_2(value_dim), widest), 16)
    tiles = cdiv(value_dim, rows)
    _advance[((sequences + 1) * heads * tiles,)](
        q, k, v, state, query_start_loc, cache_indices, has_initial_state, systems, pairs, scales, out,
        tokens, sequences, q.stride(1), k.stride(1), v.stride(1), *state.stride()[:2],
        cache_indices.stride(0), 0 if has_initial_state is None else has_initial_state.stride(0),
        V_TOKEN=v.stride(0), VALUE_DIM=value_dim, S_ROW=state.stride(2), TILES=tiles,
        HAS_FLAGS=has_initial_state is not None, VALUE=rows,
        num_stages=2, **shared,
    )  # fmt: skip
    return out
