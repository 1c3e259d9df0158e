"""Operators against the modules of Hugging Face transformers that they replace, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Qwen3MoeConfig,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_neox
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import vllm_fl_reference.ops as ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result, expected.detach(), rtol=tolerance, atol=tolerance)


def randomize(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.requires_grad_(False)


def test_rms_norm() -> None:
    norm, x = randomize(LlamaRMSNorm(96, eps=1e-5)), torch.randn(7, 96)
    close(ops.rms_norm(x, None, norm.weight, 1e-5), norm(x))


def test_gemma_rms_norm() -> None:
    norm, x = randomize(GemmaRMSNorm(96, eps=1e-6)), torch.randn(7, 96)
    close(ops.gemma_rms_norm(x, None, norm.weight, 1e-6), norm(x))


def test_rms_norm_gated() -> None:
    norm, x, gate = randomize(Qwen3NextRMSNormGated(32)), torch.randn(9, 4, 32), torch.randn(9, 4, 32)
    close(ops.rms_norm_gated(x, gate, norm.weight, 1e-6), norm(x, gate))


def angles(positions: Tensor, size: int) -> Tensor:
    return positions[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)


def test_rotary_embedding_of_llama() -> None:
    query, key, positions = torch.randn(11, 6, 32), torch.randn(11, 2, 32), torch.randint(0, 100, (11,))
    table = angles(torch.arange(100), 32)
    doubled = torch.cat((table, table), 1)[positions][None]
    expected = apply_neox(query.transpose(0, 1)[None], key.transpose(0, 1)[None], doubled.cos(), doubled.sin())
    results = ops.rotary_embedding(query, key, table.cos(), table.sin(), positions, True)
    for result, wanted in zip(results, expected, strict=True):
        close(result, wanted[0].transpose(0, 1))


def test_rotary_embedding_of_gptj() -> None:
    query, positions = torch.randn(11, 6, 32), torch.randint(0, 100, (11,))
    table = angles(torch.arange(100), 32)
    expected = apply_interleaved(query[None], table.sin()[positions][None], table.cos()[positions][None])
    close(ops.rotary_embedding(query, None, table.cos(), table.sin(), positions, False), expected[0])


def outputs(tokens: int, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(tokens, topk),
        torch.empty(tokens, topk, dtype=torch.int32),
        torch.empty(tokens, topk, dtype=torch.int32),
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 13])
def test_qwen3_moe_block(tokens: int, renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=48,
        moe_intermediate_size=24,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=renormalize,
        experts_implementation="eager",
    )
    block, x = randomize(Qwen3MoeSparseMoeBlock(config)), torch.randn(tokens, 48)
    weights, ids, order = outputs(tokens, 4)
    ops.topk_softmax(weights, ids, order, nn.functional.linear(x, block.gate.weight), renormalize)
    result = ops.fused_experts(x, block.experts.gate_up_proj, block.experts.down_proj, weights, ids)
    close(result, block(x[None])[0])


def test_gpt_oss_experts() -> None:
    config = GptOssConfig(hidden_size=40, intermediate_size=24, num_local_experts=8, experts_implementation="eager")
    experts = randomize(GptOssExperts(config))
    experts.gate_up_proj *= 20  # some gates past the bound
    x, ids = torch.randn(9, 40), torch.rand(9, 8).argsort(-1)[:, :3]
    shares = torch.rand(9, 3)

    def gate_first(x: Tensor) -> Tensor:
        return torch.cat((x[:, 0::2], x[:, 1::2]), 1)

    result = ops.fused_experts(
        x,
        gate_first(experts.gate_up_proj.transpose(1, 2)),
        experts.down_proj.transpose(1, 2),
        shares,
        ids,
        "swigluoai",
        w1_bias=gate_first(experts.gate_up_proj_bias),
        w2_bias=experts.down_proj_bias,
    )
    close(result, experts(x, ids, shares), 1e-4)


def test_deepseek_v3_router() -> None:
    config = DeepseekV3Config(
        hidden_size=32, n_routed_experts=64, n_group=8, topk_group=3, num_experts_per_tok=6, routed_scaling_factor=2.5
    )
    router, x = randomize(DeepseekV3TopkRouter(config)), torch.randn(17, 32)
    router.e_score_correction_bias.normal_()
    logits, expected_weights, expected_ids = router(x)
    weights, ids = ops.grouped_topk(logits, 8, 3, 6, True, 2.5, router.e_score_correction_bias, 1)
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.long().gather(1, order), expected_ids.gather(1, expected_order))
    close(weights.gather(1, order), expected_weights.gather(1, expected_order))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("form", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_gated_delta_rule_of_qwen3_next(form: Any, length: int) -> None:
    q, k, v = torch.randn(length, 2, 16), torch.randn(length, 2, 16), torch.randn(length, 4, 24)
    g, beta, state = -torch.rand(length, 4), torch.rand(length, 4), torch.randn(3, 4, 24, 16)
    arguments = {
        "initial_state": state[2:].transpose(2, 3).clone(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    expected, expected_state = form(*(x[None] for x in (q, k, v, g, beta)), **arguments)
    one = torch.tensor([0, length], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.tensor([True])
    result = ops.chunk_gated_delta_rule(q, k, v, g, beta, state, *one)
    close(result, expected[0])
    close(state[2], expected_state[0].transpose(1, 2))


def test_repetition_penalties() -> None:
    logits, tokens = torch.randn(3, 50), torch.randint(0, 50, (3, 12))
    seen = torch.zeros(3, 50, dtype=torch.bool).scatter_(1, tokens, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits.clone())
    ops.apply_repetition_penalties(logits, seen, seen & False, torch.full((3,), 1.3))
    close(logits, expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, None), (None, 0.8), (20, 0.6), (1, 0.1)])
def test_top_k_top_p(top_k: int | None, top_p: float | None) -> None:
    logits = torch.randn(4, 60) * 3
    expected = logits.clone()
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ops.apply_top_k_top_p(
        logits,
        None if top_k is None else torch.full((4,), top_k),
        None if top_p is None else torch.full((4,), top_p),
    )
    close(logits, expected)
