"""The operators once more, in float64 and in the most literal form: loops over tokens, heads, experts and groups.

Each function has the operator's signature, takes NumPy arrays, writes into those arguments that the operator writes,
and returns what it returns. Written from the catalogue's docstrings alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    out: Array = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return out


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    erf = np.array([math.erf(v / math.sqrt(2.0)) for v in x.ravel()]).reshape(x.shape)
    return 0.5 * x * (1.0 + erf)


def silu_and_mul(x: Array) -> Array:
    d = x.shape[-1] // 2
    return silu(x[..., :d]) * x[..., d:]


def gelu_and_mul(x: Array, approximate: str = "none") -> Array:
    d = x.shape[-1] // 2
    return gelu(x[..., :d], approximate) * x[..., d:]


def normalized(x: Array, epsilon: float) -> Array:
    out = np.empty_like(x)
    for index in np.ndindex(*x.shape[:-1]):
        mean = sum(v * v for v in x[index].tolist()) / x.shape[-1]
        out[index] = x[index] / math.sqrt(mean + epsilon)
    return out


def rms_norm(x: Array, residual: Array | None, weight: Array | None, epsilon: float) -> Array | tuple[Array, Array]:
    s = x if residual is None else x + residual
    out = normalized(s, epsilon) * (1.0 if weight is None else weight)
    return out if residual is None else (out, s)


def gemma_rms_norm(x: Array, residual: Array | None, weight: Array, epsilon: float) -> Array | tuple[Array, Array]:
    return rms_norm(x, residual, 1.0 + weight, epsilon)


def rms_norm_gated(
    x: Array,
    gate: Array | None,
    weight: Array,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> Array:
    factor = np.ones_like(x) if gate is None else sigmoid(gate) if activation == "sigmoid" else silu(gate)
    inner = x if norm_before_gate else x * factor
    size = group_size or x.shape[-1]
    out = np.empty_like(x)
    for start in range(0, x.shape[-1], size):
        out[..., start : start + size] = normalized(inner[..., start : start + size], epsilon)
    out *= weight
    if norm_before_gate:
        out *= factor
    return out


def rotary_embedding(
    query: Array, key: Array | None, cos: Array, sin: Array, position_ids: Integers, is_neox_style: bool
) -> Array | tuple[Array, Array]:
    half = cos.shape[1]

    def rotate(x: Array) -> Array:
        out: Array = x.copy()
        for t, position in enumerate(position_ids):
            for i in range(half):
                first, second = (i, i + half) if is_neox_style else (2 * i, 2 * i + 1)
                a, b, c, s = x[t, :, first], x[t, :, second], cos[position, i], sin[position, i]
                out[t, :, first] = a * c - b * s
                out[t, :, second] = b * c + a * s
        return out

    return rotate(query) if key is None else (rotate(query), rotate(key))


def reshape_and_cache(key: Array, value: Array, key_cache: Array, value_cache: Array, slot_mapping: Integers) -> None:
    block_size = key_cache.shape[2]
    for t, slot in enumerate(slot_mapping):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[t]
            value_cache[slot // block_size, :, slot % block_size] = value[t]


def compute_slot_mapping(
    query_start_loc: Integers, positions: Integers, block_table: Integers, slot_mapping: Integers, block_size: int
) -> None:
    slot_mapping[:] = -1
    for request in range(len(query_start_loc) - 1):
        for t in range(query_start_loc[request], query_start_loc[request + 1]):
            block, offset = divmod(positions[t], block_size)
            slot_mapping[t] = block_table[request, block] * block_size + offset


def concat_and_cache_mla(kv_c: Array, k_pe: Array, kv_cache: Array, slot_mapping: Integers) -> None:
    for t, slot in enumerate(slot_mapping):
        if slot >= 0:
            block, offset = divmod(slot, kv_cache.shape[1])
            kv_cache[block, offset, : kv_c.shape[1]] = kv_c[t]
            kv_cache[block, offset, kv_c.shape[1] :] = k_pe[t]


def mla_attention(
    query: Array,
    kv_cache: Array,
    block_table: Integers,
    seq_lens: Integers,
    query_start_loc: Integers,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    num_decodes: int,
) -> Array:
    out = np.zeros((*query.shape[:2], kv_lora_rank))
    for r, length in enumerate(seq_lens):
        begin, end = query_start_loc[r], query_start_loc[r + 1]
        places = [divmod(j, kv_cache.shape[1]) for j in range(length)]
        rows = [kv_cache[block_table[r, block], offset] for block, offset in places]
        for t in range(begin, end):
            seen = np.stack(rows[: length - (end - 1 - t)])
            for h in range(query.shape[1]):
                weights = np.exp(scale * seen @ query[t, h])
                out[t, h] = weights @ seen[:, :kv_lora_rank] / weights.sum()
    return out


def apply_repetition_penalties(
    logits: Array, prompt_mask: NDArray[np.bool_], output_mask: NDArray[np.bool_], repetition_penalties: Array
) -> None:
    for r, penalty in enumerate(repetition_penalties):
        for v in range(logits.shape[1]):
            if prompt_mask[r, v] or output_mask[r, v]:
                logits[r, v] = logits[r, v] / penalty if logits[r, v] > 0 else logits[r, v] * penalty


def apply_top_k_top_p(logits: Array, top_k: Integers | None, top_p: Array | None) -> None:
    vocabulary = logits.shape[1]
    for r in range(logits.shape[0]):
        row = logits[r].copy()
        kept = np.ones(vocabulary, dtype=bool)
        if top_k is not None and 1 <= top_k[r] < vocabulary:
            higher = vocabulary - np.searchsorted(np.sort(row), row, side="right")  # tokens of higher logit
            kept &= higher < top_k[r]
        if top_p is not None and top_p[r] < 1:
            weights = np.where(kept, np.exp(row - row.max()), 0.0)
            values, which = np.unique(row, return_inverse=True)
            mass = np.zeros(len(values))
            np.add.at(mass, which, weights / weights.sum())
            above = np.append(np.cumsum(mass[::-1])[::-1][1:], 0.0)  # probability of tokens of higher logit
            kept &= (above[which] < top_p[r]) | (row == row.max())
        logits[r] = np.where(kept, row, -np.inf)


#: All finite float8_e4m3fn numbers that are not negative, by their bits: four of exponent (bias 7), three of mantissa.
FP8_NUMBERS = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
)


def to_fp8(x: Array) -> Array:
    """The nearest float8_e4m3fn number; of two equally near ones, that with the even mantissa."""
    magnitude = np.minimum(np.abs(x), FP8_NUMBERS[-1])
    upper = np.searchsorted(FP8_NUMBERS, magnitude)
    lower = np.maximum(upper - 1, 0)
    down, up = magnitude - FP8_NUMBERS[lower], FP8_NUMBERS[upper] - magnitude
    nearest = np.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, lower)
    out: Array = np.copysign(FP8_NUMBERS[nearest], x)
    return out


def per_token_group_quant_fp8(
    x: Array, group_size: int, eps: float = 1e-10, column_major_scales: bool = False, use_ue8m0: bool = False
) -> tuple[Array, Array]:
    q = np.empty_like(x)
    scales = np.empty((*x.shape[:-1], x.shape[-1] // group_size))
    for index in np.ndindex(*scales.shape):
        part = (*index[:-1], slice(index[-1] * group_size, (index[-1] + 1) * group_size))
        scale = max(np.abs(x[part]).max(), eps) / 448.0
        if use_ue8m0:
            scale = 2.0 ** math.ceil(math.log2(scale))
        scales[index] = scale
        q[part] = to_fp8(np.clip(x[part] / scale, -448.0, 448.0))
    return q, scales


def scaled_mm(a: Array, b: Array, scale_a: Array, scale_b: Array, out_dtype: str, bias: Array | None = None) -> Array:
    (m, k), n = a.shape, b.shape[1]

    def spread(scale: Array, rows: int, columns: int, square: bool) -> Array:
        """One scale for each entry of the matrix; the last block may be smaller than the others."""
        if scale.size == 1:
            return np.full((rows, columns), scale.flat[0])
        tall = -(-rows // scale.shape[0]) if rows else 1
        wide = tall if square else -(-columns // scale.shape[1])
        out = np.empty((rows, columns))
        for i, j in np.ndindex(*scale.shape):
            out[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide] = scale[i, j]
        return out

    blocks = scale_b.size > 1 and scale_b.shape[1] != n
    product = (a * spread(scale_a, m, k, False)) @ (b * spread(scale_b, k, n, blocks))
    return product if bias is None else product + bias
