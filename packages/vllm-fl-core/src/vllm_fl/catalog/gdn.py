"""Gated delta networks (Yang et al., 2024): the short convolution, the gates and the delta rule of Qwen3-Next.

States are kept in vLLM's layout: convolution [slots, C, W - 1], delta rule [slots, Hv, Dv, Dk]. Slot 0 and negative
slots are vLLM's padding: their tokens give zeros and no state is written for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import gdn as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(
    called_from="QwenGatedDeltaNetAttention",
    mutates=("conv_states",),
    cases=inputs.causal_conv1d_fn,
    sized=sized.causal_conv1d_fn,
)
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
    """Causal depthwise convolution over the tokens of each sequence of a packed batch.

    ``out[t, c] = act(bias[c] + sum_w weight[c, w] * x[t - W + 1 + w, c])``; entries before the start of the sequence
    come from its state, or are 0 where `has_initial_state` is false. Afterwards the first W - 1 columns of the state
    hold the last W - 1 inputs, oldest first; further columns (for speculative tokens) are neither read nor written.

    Args:
        x: [T, C], floating: the sequences one after another.
        weight: [C, W].
        bias: [C], or None.
        conv_states: [slots, C, at least W - 1], any strides; written.
        query_start_loc: [N + 1], int32: token ranges of the sequences.
        cache_indices: [N], integers: slot of each sequence.
        has_initial_state: [N], bool; None means none has one.
        activation: ``"silu"`` (``"swish"`` is the same) or None.

    Returns:
        [T, C], dtype of `x`.
    """
    return x.new_empty(x.shape)


@operator(
    called_from="QwenGatedDeltaNetAttention",
    mutates=("conv_states",),
    cases=inputs.causal_conv1d_update,
    sized=sized.causal_conv1d_update,
)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    cache_indices: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """One decode step of causal_conv1d_fn: one token a sequence, each with a state.

    Args:
        x: [N, C], floating.
        weight: [C, W].
        bias: [C], or None.
        conv_states: [slots, C, at least W - 1], any strides; written.
        cache_indices: [N], integers: slot of each sequence.
        activation: ``"silu"`` (``"swish"`` is the same) or None.

    Returns:
        [N, C], dtype of `x`.
    """
    return x.new_empty(x.shape)


@operator(called_from="QwenGatedDeltaNetAttention", cases=inputs.fused_gdn_gating, sized=sized.fused_gdn_gating)
def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and write strength: ``g = -exp(A_log) * softplus(a + dt_bias)``, ``beta = sigmoid(b)``, in float32.

    Args:
        A_log: [Hv].
        a: [T, Hv], floating.
        b: [T, Hv], floating.
        dt_bias: [Hv].

    Returns:
        g [T, Hv] float32, float64 for a float64 `a` (the logarithm of the decay), and beta [T, Hv] in the dtype of `b`.
    """
    import torch

    return a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, torch.float32)), b.new_empty(b.shape)


@operator(
    called_from="QwenGatedDeltaNetAttention",
    mutates=("state",),
    rounded=("state",),
    cases=inputs.chunk_gated_delta_rule,
    sized=sized.chunk_gated_delta_rule,
    # Twice the defaults: what tokens write rounds to the dtype before it is read.
    tolerances={"float16": (4e-3, 2e-3), "bfloat16": (3.2e-2, 2e-2)},
)
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
    """The gated delta rule over the tokens of each sequence of a packed batch, in chunks (prefill).

    For each value head, with S of [Dv, Dk] in float32: ``S <- exp(g_t) S``; ``S <- S + beta_t (v_t - S k_t) k_t^T``;
    ``o_t = scale * S q_t``. Query and key heads are repeated Hv / Hk times, neighbours together.

    Args:
        q: [T, Hk, Dk], floating.
        k: [T, Hk, Dk].
        v: [T, Hv, Dv].
        g: [T, Hv], float32: logarithm of the decay.
        beta: [T, Hv].
        state: [slots, Hv, Dv, Dk], floating, any strides; written.
        query_start_loc: [N + 1], int32: token ranges of the sequences.
        cache_indices: [N], integers: slot of each sequence.
        has_initial_state: [N], bool: False starts from zeros; None means none has one.
        scale: None is ``Dk ** -0.5``.
        use_qk_l2norm: divide q and k by ``sqrt(sum of squares + 1e-6)`` over Dk first.

    Returns:
        [T, Hv, Dv], dtype of `v`.
    """
    return v.new_empty(v.shape)


@operator(
    called_from="QwenGatedDeltaNetAttention",
    mutates=("state",),
    rounded=("state",),
    cases=inputs.fused_recurrent_gated_delta_rule,
    sized=sized.fused_recurrent_gated_delta_rule,
)
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

    The formula is that of chunk_gated_delta_rule.

    Args:
        q: [N, Hk, Dk], floating.
        k: [N, Hk, Dk].
        v: [N, Hv, Dv].
        g: [N, Hv], float32: logarithm of the decay.
        beta: [N, Hv].
        state: [slots, Hv, Dv, Dk], floating, any strides; written.
        cache_indices: [N], integers: slot of each sequence.
        scale: None is ``Dk ** -0.5``.
        use_qk_l2norm: divide q and k by ``sqrt(sum of squares + 1e-6)`` over Dk first.

    Returns:
        [N, Hv, Dv], dtype of `v`.
    """
    return v.new_empty(v.shape)
