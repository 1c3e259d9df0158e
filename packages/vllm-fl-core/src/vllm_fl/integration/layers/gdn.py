"""Gated delta networks of Qwen3-Next and Qwen3.5: the part between the projections.

Projections, output norm and state allocation stay vLLM's; the norm is a layer of its own (``rms_norm_gated``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from vllm_fl.dispatch import bind

from . import replace

_causal_conv1d_fn = bind("causal_conv1d_fn")
_causal_conv1d_update = bind("causal_conv1d_update")
_chunk_gated_delta_rule = bind("chunk_gated_delta_rule")
_fused_gdn_gating = bind("fused_gdn_gating")
_fused_recurrent_gated_delta_rule = bind("fused_recurrent_gated_delta_rule")


@dataclass(frozen=True)
class GDNBatch:
    """One step's requests, decodes first, as the operators want them; the same for all layers.

    Args:
        decodes: number of decodes, one token each.
        tokens: number of tokens, decodes included.
        decode_slots: [decodes], state slot of each decode; each has a state.
        prefill_start: [prefills + 1], token ranges of the prefills, counted from the first prefill token.
        prefill_slots: [prefills], state slot of each prefill.
        prefill_has_state: [prefills], bool.
    """

    decodes: int
    tokens: int
    decode_slots: torch.Tensor
    prefill_start: torch.Tensor | None
    prefill_slots: torch.Tensor | None
    prefill_has_state: torch.Tensor | None


def make_batch(metadata: Any, computed: torch.Tensor) -> GDNBatch:
    """Split the requests of vLLM's metadata.

    Args:
        metadata: GDNAttentionMetadata without speculative decodes.
        computed: [requests], tokens of each that were computed in earlier steps.
    """
    decodes = metadata.num_decodes
    slots = metadata.non_spec_state_indices_tensor
    start = prefill_slots = has_state = None
    if metadata.num_prefills:
        start = metadata.non_spec_query_start_loc[decodes:] - metadata.num_decode_tokens
        prefill_slots = slots[decodes:]
        has_state = computed[decodes:] > 0
    return GDNBatch(
        decodes=decodes,
        tokens=metadata.num_actual_tokens,
        decode_slots=slots[:decodes],
        prefill_start=start,
        prefill_slots=prefill_slots,
        prefill_has_state=has_state,
    )


def fresh_slots(slots: torch.Tensor, computed: torch.Tensor, maybe_fresh: torch.Tensor | None) -> torch.Tensor | None:
    """Slots of the decodes that have no state yet: the first tokens of prompts of one token.

    Nothing waits for the device. What the host cannot rule out gives slot 0, vLLM's padding, whose state nobody reads.

    Args:
        slots: [decodes].
        computed: [decodes], tokens of each that were computed in earlier steps.
        maybe_fresh: [decodes], bool, on the host: False rules a decode out. None rules out nobody.

    Returns:
        Slots to clear, int64; None if the host rules out all decodes.
    """
    low, high = 0, len(slots)
    if maybe_fresh is not None:
        found = maybe_fresh.nonzero()
        if not len(found):
            return None
        low, high = int(found[0]), int(found[-1]) + 1
    return torch.where(computed[low:high] == 0, slots[low:high], 0).long()


class FLGDNAttentionMetadataBuilder(GDNAttentionMetadataBuilder):
    """vLLM's metadata, with the batch as our operators want it in ``vllm_fl_batch``.

    vLLM counts a request of one token as a decode even if it is the whole prompt, and does not say which have no state.
    Their slots are cleared here, in all layers: this runs before every step, outside the graph of a captured one.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._fl_layers = [context[name] for name in layer_names]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        _refuse_speculation(metadata.spec_sequence_masks is not None)
        common = common_attn_metadata
        computed = common.seq_lens - (common.query_start_loc[1:] - common.query_start_loc[:-1])
        metadata.vllm_fl_batch = batch = make_batch(metadata, computed)
        if batch.decodes:
            clear_fresh(self._fl_layers, batch, computed, _maybe_fresh(common, batch.decodes))
        return metadata


def _maybe_fresh(common: Any, decodes: int) -> torch.Tensor | None:
    """Which decodes may have no state, as far as the host knows; None if it knows nothing."""
    prefilling = getattr(common, "is_prefilling", None)
    if prefilling is None:
        return None
    found: torch.Tensor = prefilling[:decodes]
    bound = getattr(common, "seq_lens_cpu_upper_bound", None)  # exact without speculation
    return found if bound is None else found & (bound[:decodes] <= 1)


def clear_fresh(layers: list[Any], batch: GDNBatch, computed: torch.Tensor, maybe_fresh: torch.Tensor | None) -> None:
    """Clear both states of the decodes that have none yet, in all layers.

    Args:
        layers: vLLM's layers, each with its states in ``kv_cache``.
        batch: the step's requests.
        computed: [requests], tokens of each that were computed in earlier steps.
        maybe_fresh: as in :func:`fresh_slots`.
    """
    slots = fresh_slots(batch.decode_slots, computed[: batch.decodes], maybe_fresh)
    if slots is not None:
        for layer in layers:
            for state in layer.kv_cache[:2]:
                state.index_fill_(0, slots, 0)


def _refuse_speculation(speculates: bool) -> None:
    if speculates:
        raise NotImplementedError(
            "speculative decoding of a model with gated delta networks is not available through dispatch; leave out "
            "--speculative-config, or set VLLM_FL_OOT_BLACKLIST=gated_delta_net to use vLLM's own layer where it runs"
        )


class FLGDNAttentionBackend(GDNAttentionBackend):
    """vLLM's backend with our metadata builder."""

    @staticmethod
    def get_builder_cls() -> type[FLGDNAttentionMetadataBuilder]:
        return FLGDNAttentionMetadataBuilder


class FLQwenGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """The layer with convolution, gates and delta rule through dispatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_speculation(self.num_spec > 0)

    def get_attn_backend(self) -> type[FLGDNAttentionBackend]:
        return FLGDNAttentionBackend

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Convolution, gates and delta rule of the step's tokens.

        Args:
            mixed_qkv: [T or more, channels]: queries, keys and values of all heads.
            b: [T or more, Hv], before the sigmoid.
            a: [T or more, Hv], the decay's input.
            core_attn_out: [T or more, Hv, Dv], zeros; rows 0 to T - 1 are written.
        """
        every_layer = get_forward_context().attn_metadata
        if every_layer is None:  # profiling: no request, no state
            return
        batch: GDNBatch = every_layer[self.prefix].vllm_fl_batch
        conv_state, state = self.kv_cache[0], self.kv_cache[1]
        if not is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)
        decay, beta = _fused_gdn_gating.fn(self.A_log, a[: batch.tokens], b[: batch.tokens], self.dt_bias)
        weight = self.conv1d.weight.flatten(1)
        split = batch.decodes
        if split:
            x = _causal_conv1d_update.fn(
                mixed_qkv[:split], weight, self.conv1d.bias, conv_state, batch.decode_slots, self.activation
            )
            core_attn_out[:split] = _fused_recurrent_gated_delta_rule.fn(
                *self._heads(x), decay[:split], beta[:split], state, batch.decode_slots
            )
        if batch.prefill_slots is not None:
            sequences = (batch.prefill_start, batch.prefill_slots, batch.prefill_has_state)
            rest = slice(split, batch.tokens)
            x = _causal_conv1d_fn.fn(mixed_qkv[rest], weight, self.conv1d.bias, conv_state, *sequences, self.activation)
            heads = self._heads(x)
            core_attn_out[rest] = _chunk_gated_delta_rule.fn(*heads, decay[rest], beta[rest], state, *sequences)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, channels] -> queries and keys [N, Hk, Dk], values [N, Hv, Dv]."""
        width = self.key_dim // self.tp_size
        q, k, v = x.split([width, width, self.value_dim // self.tp_size], -1)
        return (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )


def register_gated_delta_net() -> None:
    replace(QwenGatedDeltaNetAttention, FLQwenGatedDeltaNetAttention)
