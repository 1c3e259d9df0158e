"""Literal float64 forms of the gated delta network's operators; see :mod:`ops_oracles`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from ops_oracles import Array, Integers, sigmoid, silu

Flags = NDArray[np.bool_]


def causal_conv1d_fn(
    x: Array,
    weight: Array,
    bias: Array | None,
    conv_states: Array,
    query_start_loc: Integers,
    cache_indices: Integers,
    has_initial_state: Flags | None,
    activation: str | None = "silu",
) -> Array:
    past = weight.shape[1] - 1
    out = np.zeros_like(x)
    for n, slot in enumerate(cache_indices):
        start, end = query_start_loc[n], query_start_loc[n + 1]
        if slot <= 0 or start == end:
            continue
        window = [np.zeros(x.shape[1])] * past
        if has_initial_state is not None and has_initial_state[n]:
            window = [conv_states[slot, :, i].copy() for i in range(past)]
        for t in range(start, end):
            window.append(x[t])
            value = np.zeros(x.shape[1]) if bias is None else bias.copy()
            for i in range(past + 1):
                value += weight[:, i] * window[i]
            out[t] = silu(value) if activation else value
            window.pop(0)
        for i in range(past):
            conv_states[slot, :, i] = window[i]
    return out


def causal_conv1d_update(
    x: Array,
    weight: Array,
    bias: Array | None,
    conv_states: Array,
    cache_indices: Integers,
    activation: str | None = "silu",
) -> Array:
    count = len(cache_indices)
    starts, flags = np.arange(count + 1), np.ones(count, dtype=bool)
    return causal_conv1d_fn(x, weight, bias, conv_states, starts, cache_indices, flags, activation)


def fused_gdn_gating(A_log: Array, a: Array, b: Array, dt_bias: Array) -> tuple[Array, Array]:
    x = a + dt_bias
    softplus = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    return -np.exp(A_log) * softplus, sigmoid(b)


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    query_start_loc: Integers,
    cache_indices: Integers,
    has_initial_state: Flags | None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> Array:
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    out = np.zeros_like(v)
    repeat = v.shape[1] // q.shape[1] if q.shape[1] else 1
    for n, slot in enumerate(cache_indices):
        start, end = query_start_loc[n], query_start_loc[n + 1]
        if slot <= 0 or start == end:
            continue
        for head in range(v.shape[1]):
            fresh = has_initial_state is None or not has_initial_state[n]
            s = np.zeros(state.shape[2:]) if fresh else state[slot, head].copy()
            for t in range(start, end):
                query, key = q[t, head // repeat], k[t, head // repeat]
                if use_qk_l2norm:
                    query = query / math.sqrt(query @ query + 1e-6)
                    key = key / math.sqrt(key @ key + 1e-6)
                s = math.exp(g[t, head]) * s
                s = s + beta[t, head] * np.outer(v[t, head] - s @ key, key)
                out[t, head] = factor * (s @ query)
            state[slot, head] = s
    return out


def fused_recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    cache_indices: Integers,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> Array:
    count = len(cache_indices)
    starts, flags = np.arange(count + 1), np.ones(count, dtype=bool)
    return chunk_gated_delta_rule(q, k, v, g, beta, state, starts, cache_indices, flags, scale, use_qk_l2norm)
