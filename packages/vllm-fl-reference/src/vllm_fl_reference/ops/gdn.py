"""Gated delta networks (Yang et al., 2024): gates and the gated delta rule.

The chunked form follows from unrolling the recurrence over C tokens. With b the running sum of g inside the chunk, S
the state before it, and rows i, j of the chunk::

    A[i, j] = beta_i exp(b_i - b_j) (k_i . k_j)             for j < i
    (1 + A) U = beta (V - exp(b) K S^T)                     triangular: row i of U is what token i writes
    O = exp(b) Q S^T + [exp(b_i - b_j) (q_i . k_j)] U       for j <= i
    S <- exp(b_C) S + (exp(b_C - b) U)^T K
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._chunks import Chunks
from ._dtypes import compute_dtype

#: Tokens a chunk. 32 heads of 32 x 128 float32 fit a second-level cache; longer chunks were slower on CPUs.
_CHUNK = 32
_L2_EPSILON = 1e-6
#: above it softplus(x) is x, to the last bit of float64
_SOFTPLUS_LINEAR = 40.0


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay in float32 (float64 for float64), and write strength."""
    dtype = compute_dtype(a.dtype)
    rate = functional.softplus(a.to(dtype) + dt_bias.to(dtype), threshold=_SOFTPLUS_LINEAR)
    return rate.mul_(A_log.to(dtype).exp().neg_()).contiguous(), b.sigmoid().contiguous()


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
    """One decode step of the gated delta rule: one token a sequence, each with a state.

    The value heads that share a key head are one matrix of [Hv / Hk * Dv, Dk], so that no key is repeated.
    """
    (n, heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[1:]
    if n == 0:
        return v.new_zeros(v.shape)
    dtype = compute_dtype(q.dtype)
    real = cache_indices > 0
    slots = cache_indices.clamp(min=0).to(torch.int64)
    present = real[:, None, None]
    query, key = q.to(dtype, copy=True), k.to(dtype, copy=True)
    _normalize(query, key, scale, use_qk_l2norm)
    key = torch.where(present, key, 0).reshape(n * heads, 1, key_dim)
    decay = torch.where(present, g.to(dtype).exp().unsqueeze(2), 1)

    rows = value_heads // heads * value_dim
    s = state.index_select(0, slots).to(dtype).mul_(decay.unsqueeze(3)).view(n * heads, rows, key_dim)
    recalled = torch.bmm(s, key.transpose(1, 2)).view(n, value_heads, value_dim)
    written = (v.to(dtype) - recalled).mul_(beta.to(dtype).unsqueeze(2))
    # Padded rows add zeros to their slot, whatever it and they hold, and so give it back unchanged.
    s.baddbmm_(torch.where(present, written, 0).view(n * heads, rows, 1), key)
    out = torch.bmm(s, query.reshape(n * heads, key_dim, 1)).view(n, value_heads, value_dim)
    state.index_copy_(0, slots, s.view(n, value_heads, value_dim, key_dim).to(state.dtype))
    return torch.where(present, out, 0).to(v.dtype)


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
    *,
    chunk: int = _CHUNK,
) -> Tensor:
    """The gated delta rule over the tokens of each sequence of a packed batch, `chunk` tokens at a time.

    All sequences and heads take each chunk together, longest sequences first, so that a shorter one drops out of the
    batch after its last chunk. A sequence without tokens leaves its state alone; tokens past the last sequence give
    zeros. Reads the sequence lengths on the host.
    """
    dtype = compute_dtype(q.dtype)
    out = v.new_zeros(v.shape)
    chunks = Chunks.of(query_start_loc.tolist(), cache_indices.tolist(), chunk)
    if not chunks.sequences:
        return out
    index = chunks.index(q.device)
    queries, keys, values, decays, strengths = (index.pack(x) for x in (q, k, v, g, beta))
    slots = torch.tensor(chunks.slots, device=state.device)
    s = _initial_state(state, slots, has_initial_state, chunks, dtype)
    results = torch.empty_like(values)
    for first, last in chunks.steps:
        part = slice(first, last)
        query, key, decay, strength = (_by_head(x[part], dtype) for x in (queries, keys, decays, strengths))
        _normalize(query, key, scale, use_qk_l2norm)
        value = values[part].transpose(1, 2)
        results[part] = _chunk(query, key, value, decay, strength, s[: last - first]).transpose(1, 2)
    index.unpack(results, out)
    state.index_copy_(0, slots, s.to(state.dtype))
    return out


def _normalize(query: Tensor, key: Tensor, scale: float | None, l2norm: bool) -> None:
    """Normalise both over the last dimension, if asked, and scale the query, in place."""
    if l2norm:
        query.mul_(_inverse_norm(query))
        key.mul_(_inverse_norm(key))
    query.mul_(query.shape[-1] ** -0.5 if scale is None else scale)


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(_L2_EPSILON).rsqrt_()


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, C, H, ...] to a contiguous [B, H, C, ...]."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def _initial_state(
    state: Tensor, slots: Tensor, has_initial_state: Tensor | None, chunks: Chunks, dtype: torch.dtype
) -> Tensor:
    """States before the first token of each live sequence, [live, Hv, Dv, Dk], a fresh tensor of `dtype`."""
    if has_initial_state is None:
        return state.new_zeros((len(chunks.slots), *state.shape[1:]), dtype=dtype)
    s = state.index_select(0, slots).to(dtype)
    live = torch.tensor(chunks.sequences, device=has_initial_state.device)
    return s.masked_fill_(~has_initial_state[live][:, None, None, None], 0)


def _chunk(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor) -> Tensor:
    """One chunk of each sequence of a batch.

    Args:
        query: [B, Hk, C, Dk], normalised and scaled.
        key: [B, Hk, C, Dk], normalised.
        value: [B, Hv, C, Dv], any strides and floating dtype.
        decay: [B, Hv, C]: logarithms.
        strength: [B, Hv, C].
        state: [B, Hv, Dv, Dk]; updated in place.

    Returns:
        [B, Hv, C, Dv].
    """
    batch, heads, size, key_dim = key.shape
    value_heads, value_dim = value.shape[1], value.shape[3]
    group = value_heads // heads
    query, key = query.view(batch * heads, size, key_dim), key.view(batch * heads, size, key_dim)
    strength = strength.unsqueeze(3)

    pair_decay = _pair_decay(decay)  # [B, Hv, C, C]
    since_start = decay.cumsum(2).exp_().unsqueeze(3)
    until_end = pair_decay[:, :, -1].unsqueeze(3)

    both = torch.cat((key, query), 1)  # [B * Hk, 2 C, Dk]
    reads = torch.bmm(both, state.view(batch * heads, group * value_dim, key_dim).transpose(1, 2))
    reads = reads.view(batch, heads, 2, size, group, value_dim).movedim(4, 2).contiguous()
    reads = reads.view(batch, value_heads, 2, size, value_dim).mul_(since_start.unsqueeze(2))
    recalled, read = reads.unbind(2)

    products = torch.bmm(both, key.transpose(1, 2)).view(batch, heads, 1, 2, size, size)
    products = products * pair_decay.view(batch, heads, group, 1, size, size)
    products = products.view(batch * value_heads, 2, size, size)
    system = products[:, 0] * strength.view(batch * value_heads, size, 1)
    written = recalled.neg_().add_(value).mul_(strength).view(batch * value_heads, size, value_dim)
    written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)

    out = torch.baddbmm(read.view(batch * value_heads, size, value_dim), products[:, 1], written)
    written = written.view(batch, value_heads, size, value_dim) * until_end
    shared = key.view(batch, heads, 1, size, key_dim).expand(-1, -1, group, -1, -1)
    state.mul_(since_start[:, :, -1:])
    state.view(batch * value_heads, value_dim, key_dim).baddbmm_(
        written.view(batch * value_heads, size, value_dim).transpose(1, 2),
        shared.reshape(batch * value_heads, size, key_dim),
    )
    return out.view(batch, value_heads, size, value_dim)


def _pair_decay(decay: Tensor) -> Tensor:
    """``exp(sum of decay over j < l <= i)`` at [..., i, j] for j <= i, else 0.

    Each sum is accumulated by itself: differences of one running sum would lose the digits of small decays behind a
    large one.
    """
    size = decay.shape[-1]
    square = torch.ones(size, size, dtype=torch.bool, device=decay.device)
    sums = torch.where(square.tril(-1), decay.unsqueeze(-1), 0).cumsum(-2)
    return sums.masked_fill_(square.triu(1), -torch.inf).exp_()
