"""Checkpoints of random weights for vLLM and transformers, small enough to be made and run in a test.

The weights are drawn from a fixed seed, and scaled so that the likeliest token is ahead of the next by far more than
the rounding of float32; `greedy` measures by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.125,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}


def llama() -> Any:
    """Two layers, grouped heads."""
    return transformers.LlamaConfig(**_COMMON, num_hidden_layers=2)


def qwen3() -> Any:
    """Two layers with norms on queries and keys, heads wider than hidden size over heads."""
    return transformers.Qwen3Config(**_COMMON, num_hidden_layers=2, head_dim=32)


def qwen3_moe() -> Any:
    """Two layers of eight experts, two for each token."""
    return transformers.Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_hidden_layers=2, head_dim=32, norm_topk_prob=True)


def qwen3_next() -> Any:
    """Three gated delta networks and one attention layer, experts with a shared one."""
    return transformers.Qwen3NextConfig(
        **_COMMON,
        **_EXPERTS,
        num_hidden_layers=4,
        head_dim=32,
        **_LINEAR_ATTENTION,
        shared_expert_intermediate_size=48,
        norm_topk_prob=True,
    )


def gemma2() -> Any:
    """Two layers with a cap on their scores and on the logits, the first with a window of 24 tokens."""
    return transformers.Gemma2Config(
        **{**_COMMON, "tie_word_embeddings": True},
        num_hidden_layers=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=30.0,
        sliding_window=24,
    )


def gpt_oss() -> Any:
    """Two layers with attention sinks, the first with a window of 24 tokens; experts with biases, gates interleaved."""
    return transformers.GptOssConfig(
        **{**_COMMON, "intermediate_size": 48},
        num_hidden_layers=2,
        head_dim=32,
        sliding_window=24,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


def deepseek_v3() -> Any:
    """A dense layer and one of eight experts in four groups, chosen by sigmoids with a bias; a shared expert.

    Queries come from latents, too.
    """
    return transformers.DeepseekV3Config(
        **{**_COMMON, **_LATENT_ATTENTION},
        num_hidden_layers=2,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        q_lora_rank=48,
        # transformers knows no other way of routing; vLLM has to be told.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )


def qwen2() -> Any:
    """Two layers with biases on queries, keys and values."""
    return transformers.Qwen2Config(**_COMMON, num_hidden_layers=2)


def qwen3_5() -> Any:
    """The text part: three gated delta networks and one attention layer."""
    return transformers.Qwen3_5TextConfig(**_COMMON, **_LINEAR_ATTENTION, num_hidden_layers=4, head_dim=32)


def qwen3_5_moe() -> Any:
    """The text part: three gated delta networks and one attention layer, experts with a shared one."""
    return transformers.Qwen3_5MoeTextConfig(
        **_COMMON,
        **_LINEAR_ATTENTION,
        **_EXPERTS,
        num_hidden_layers=4,
        head_dim=32,
        shared_expert_intermediate_size=48,
    )


def minimax_m2() -> Any:
    """Two layers of experts chosen by sigmoids with a bias; norms over all heads, half of a head rotated."""
    return transformers.MiniMaxM2Config(
        **{**_COMMON, "intermediate_size": 48},
        num_hidden_layers=2,
        head_dim=32,
        rotary_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        num_local_experts=8,
        num_experts_per_tok=2,
        # For vLLM; transformers knows nothing else.
        use_routing_bias=True,
        scoring_func="sigmoid",
    )


def minicpm3() -> Any:
    """Two layers of latent attention; embeddings, residuals and logits scaled."""
    return transformers.MiniCPM3Config(
        **{**_COMMON, **_LATENT_ATTENTION, "v_head_dim": 16},
        num_hidden_layers=2,
        q_lora_rank=48,
        scale_emb=2,
        scale_depth=1.4,
        dim_model_base=32,
    )


def minicpm4() -> Any:
    """Two layers of Llama with embeddings, residuals and logits scaled, and scaled rotations.

    transformers has no MiniCPM4. Its Granite computes the same, from other names for the scales, and stands for it.
    """
    factors = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
    rotation = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": _COMMON["max_position_embeddings"],
    }
    return transformers.GraniteConfig(
        **_COMMON,
        num_hidden_layers=2,
        rope_parameters=rotation,
        embedding_multiplier=2.0,
        residual_multiplier=1.4 / 2**0.5,
        logits_scaling=2.0,
        attention_multiplier=0.25,
        # The same for vLLM.
        scale_emb=2,
        scale_depth=1.4,
        dim_model_base=32,
    )


def hunyuan_dense() -> Any:
    """Two layers with norms on queries and keys, after their rotation."""
    return transformers.HunYuanDenseV1Config(**_COMMON, num_hidden_layers=2, head_dim=32, use_qk_norm=True)


def hunyuan_moe() -> Any:
    """Two layers of eight experts, two for each token, and a shared expert."""
    return transformers.HunYuanMoEV1Config(
        **{**_COMMON, "intermediate_size": 48},
        num_hidden_layers=2,
        head_dim=32,
        use_qk_norm=True,
        num_experts=8,
        moe_topk=[2, 2],
        moe_intermediate_size=[48, 48],
        num_shared_expert=[1, 1],
        use_mixed_mlp_moe=True,
    )


def glm4() -> Any:
    """Two layers with norms before and after, biases on queries, keys and values; half of a head rotated in pairs."""
    return transformers.Glm4Config(**_COMMON, num_hidden_layers=2, head_dim=32)


def glm4_moe() -> Any:
    """A dense layer and one of eight experts, chosen by sigmoids with a bias, and a shared one; half a head rotated."""
    return transformers.Glm4MoeConfig(
        **_COMMON,
        num_hidden_layers=2,
        head_dim=32,
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
    )


def deepseek_v2() -> Any:
    """A dense layer and one of eight experts, chosen by a softmax; two shared experts."""
    return transformers.DeepseekV2Config(
        **{**_COMMON, **_LATENT_ATTENTION},
        num_hidden_layers=2,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        q_lora_rank=None,
        topk_method="greedy",
        scoring_func="softmax",
    )


def gemma3() -> Any:
    """Two layers with norms on queries and keys, the first with a window of 24 tokens and its own rotation."""
    return transformers.Gemma3TextConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        num_hidden_layers=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    )


def mixtral() -> Any:
    """Two layers of eight experts, two for each token."""
    return transformers.MixtralConfig(
        **{**_COMMON, "intermediate_size": 48}, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2
    )


def phi3() -> Any:
    """Two layers, projections packed, three quarters of a head rotated; what Phi-4 and Phi-4-mini are made of."""
    return transformers.Phi3Config(**{**_COMMON, "hidden_size": 128}, num_hidden_layers=2, partial_rotary_factor=0.75)


def olmo2() -> Any:
    """Two layers with norms after attention and MLP, and over all heads of queries and keys."""
    return transformers.Olmo2Config(**_COMMON, num_hidden_layers=2)


def ernie4_5() -> Any:
    """Two layers, heads rotated in pairs."""
    return transformers.Ernie4_5Config(**_COMMON, num_hidden_layers=2, head_dim=16)


_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "initializer_range": 0.125,
}


def bert() -> Any:
    """Two layers, attention to both sides."""
    return transformers.BertConfig(**_ENCODER, num_hidden_layers=2)


def modernbert() -> Any:
    """Four layers, all but the first and the last with a window of eight tokens to each side."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return transformers.ModernBertConfig(**_ENCODER, **special, num_hidden_layers=4, local_attention=16)


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    make_config.__name__: make_config
    for make_config in (
        *(llama, qwen3, qwen3_moe, qwen3_next),
        *(gemma2, gpt_oss, deepseek_v3, qwen2, qwen3_5, qwen3_5_moe),
        *(minimax_m2, minicpm3, minicpm4, hunyuan_dense, hunyuan_moe, glm4, glm4_moe),
        *(deepseek_v2, gemma3, mixtral, phi3, olmo2, ernie4_5),
    )
}

ENCODERS: dict[str, Callable[[], Any]] = {"bert": bert, "modernbert": modernbert}

#: Classes of vLLM for checkpoints of another class of transformers.
SERVED_AS = {"minicpm4": "MiniCPMForCausalLM"}


def make(name: str, path: Path, seed: int = 0, **changes: Any) -> Any:
    """Write a checkpoint and return its transformers model, float32, in evaluation mode.

    Args:
        name: a key of CONFIGURATIONS or ENCODERS.
        path: directory to write to.
        seed: of the weights.
        changes: attributes of the configuration, such as ``head_dim``.
    """
    torch.manual_seed(seed)
    config = {**CONFIGURATIONS, **ENCODERS}[name]()
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    auto = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForCausalLM
    # Others leave out what they do not have, such as the cap on Gemma 2's scores in transformers 5.20.
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for tensor_name, tensor in tensors:
            # What transformers sets to zeros or ones would not show that it is used.
            if tensor_name.endswith("sinks"):
                tensor.normal_()
            elif tensor_name.endswith(("norm.weight", "bias")):
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
        if name in CONFIGURATIONS and model.config.tie_word_embeddings:
            # A token's own embedding must not outweigh what the layers add, or it repeats for ever.
            model.get_input_embeddings().weight.mul_(0.25)
    model.save_pretrained(path)
    if name in SERVED_AS:
        model.config.architectures = [SERVED_AS[name]]
        model.config.save_pretrained(path)
    return model.eval()


@dataclass(frozen=True)
class Continuation:
    """What a model says after a prompt; `margin` is the least lead of the likeliest token, in logits."""

    tokens: list[int]
    margin: float


def greedy(model: Any, prompt: Sequence[int], count: int) -> Continuation:
    """Continue a prompt by `count` tokens, the likeliest each, with the cache of transformers."""
    tokens: list[int] = []
    margin = float("inf")
    inputs, cache = torch.tensor([list(prompt)]), None
    with torch.inference_mode():
        for _ in range(count):
            answer = model(inputs, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            best, second = answer.logits[0, -1].topk(2).values.tolist()
            margin = min(margin, best - second)
            tokens.append(int(answer.logits[0, -1].argmax()))
            inputs = torch.tensor([tokens[-1:]])
    return Continuation(tokens, margin)
