"""One case of each operator for any number of tokens (or requests), of sizes that models have.

For sweeps over the number of tokens, for compilation with a dynamic number of tokens and for graph capture. The first
dimension of every tensor that holds one row a token is that number.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from vllm_fl.catalog.spec import Case, InputMaker

from . import attention, gdn, moe, rotary

if TYPE_CHECKING:
    import torch

_EPSILON = 1e-6
_BLOCK = 16  # tokens a block of the KV cache


def _case(tokens: int, *args: object) -> Case:
    return Case(f"{tokens} tokens", args)


def silu_and_mul(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, maker.normal(tokens, 2 * 1408))


def gelu_and_mul(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, maker.normal(tokens, 2 * 1408), "tanh")


def rms_norm(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, maker.normal(tokens, 2048), maker.normal(tokens, 2048), maker.normal(2048), _EPSILON)


gemma_rms_norm = rms_norm


def rms_norm_gated(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, maker.normal(tokens, 1024), maker.normal(tokens, 1024), maker.normal(1024), _EPSILON, 128)


def rotary_embedding(maker: InputMaker, tokens: int) -> Case:
    import torch

    tables = rotary.make_tables(maker, 128)
    positions = maker.integers(0, len(tables[0]), tokens, dtype=torch.int64)
    return _case(tokens, maker.normal(tokens, 8, 128), maker.normal(tokens, 2, 128), *tables, positions, True)


def reshape_and_cache(maker: InputMaker, tokens: int) -> Case:
    import torch

    blocks = max(tokens // _BLOCK + 2, 64)  # the same cache for small batches
    cache = maker.normal(blocks, _BLOCK, 2, 2 * 128).transpose(1, 2)
    slots = maker.permutation(blocks * _BLOCK, dtype=torch.int64)[:tokens]
    key, value = maker.normal(tokens, 2, 128), maker.normal(tokens, 2, 128)
    return _case(tokens, key, value, cache[..., :128], cache[..., 128:], slots)


def compute_slot_mapping(maker: InputMaker, tokens: int) -> Case:
    import torch

    starts = _lengths(tokens)
    positions = [t - low for low, high in pairwise(starts) for t in range(low, high)]
    width = max(positions, default=0) // _BLOCK + 2
    return _case(
        tokens,
        maker.tensor(starts, dtype=torch.int32),
        maker.tensor(positions, dtype=torch.int64),
        maker.permutation((len(starts) - 1) * width).view(-1, width),
        maker.tensor([-7] * tokens, dtype=torch.int64),
        _BLOCK,
    )


def concat_and_cache_mla(maker: InputMaker, tokens: int) -> Case:
    import torch

    blocks = max(tokens // _BLOCK + 2, 64)
    slots = maker.permutation(blocks * _BLOCK, dtype=torch.int64)[:tokens]
    return _case(tokens, maker.normal(tokens, 512), maker.normal(tokens, 64), maker.normal(blocks, _BLOCK, 576), slots)


def mla_attention(maker: InputMaker, tokens: int) -> Case:
    requests = [(20, high - low) for low, high in pairwise(_lengths(tokens))]
    batch = attention.make_latent_batch(maker, requests, 16, (128, 32), _BLOCK)
    # The bound on the lengths and the number of decodes are the same for small batches, as in a compiled graph.
    return _case(tokens, *batch, 128, 160**-0.5, max(tokens, 64), 0)


def topk_softmax(maker: InputMaker, tokens: int) -> Case:
    import torch

    outputs = (
        maker.full(-1.0, tokens, 8, dtype=_wide(maker)),
        maker.full(-1, tokens, 8, dtype=torch.int32),
        maker.full(-1, tokens, 8, dtype=torch.int32),
    )
    return _case(tokens, *outputs, moe.make_logits(maker, tokens, 64), True)


topk_sigmoid = topk_softmax


def grouped_topk(maker: InputMaker, tokens: int) -> Case:
    # Scores on a grid of 2 ** -5, biases on one of 2 ** -19: sums of two are exact in float32, and hardly ever equal.
    bias = maker.integers(0, 1 << 13, 256).to(_wide(maker)) * 2.0**-19
    return _case(tokens, moe.make_logits(maker, tokens, 256), 8, 4, 8, True, 2.5, bias, 0)


def moe_align_block_size(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, moe.make_routes(maker, tokens, 64, 8), 64, 64)


def moe_sum(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, maker.normal(tokens, 8, 512), maker.full(7.0, tokens, 512))


def fused_experts(maker: InputMaker, tokens: int) -> Case:
    experts, hidden, inner, topk = 16, 256, 128, 4
    w1 = maker.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    w2 = maker.normal(experts, hidden, inner, scale=inner**-0.5)
    ids = moe.make_routes(maker, tokens, experts, topk)
    return _case(tokens, maker.normal(tokens, hidden), w1, w2, moe.make_shares(maker, tokens, topk), ids)


def causal_conv1d_fn(maker: InputMaker, tokens: int) -> Case:
    import torch

    starts = _lengths(tokens)
    count = len(starts) - 1
    return _case(
        tokens,
        maker.normal(tokens, 256),
        maker.normal(256, 4, scale=0.5),
        maker.normal(256),
        maker.normal(count + 1, 3, 256).transpose(1, 2),
        maker.tensor(starts, dtype=torch.int32),
        gdn.make_slots(maker, count, count + 1, {}),
        maker.tensor([True] * count),
    )


def causal_conv1d_update(maker: InputMaker, tokens: int) -> Case:
    states = maker.normal(tokens + 1, 3, 256).transpose(1, 2)
    used = gdn.make_slots(maker, tokens, tokens + 1, {})
    return _case(tokens, maker.normal(tokens, 256), maker.normal(256, 4, scale=0.5), maker.normal(256), states, used)


def fused_gdn_gating(maker: InputMaker, tokens: int) -> Case:
    a_log = maker.uniform(-2.0, 2.7, 32, dtype=_wide(maker))
    return _case(tokens, a_log, maker.normal(tokens, 32, scale=2.0), maker.normal(tokens, 32), maker.normal(32))


def chunk_gated_delta_rule(maker: InputMaker, tokens: int) -> Case:
    import torch

    starts = _lengths(tokens)
    count = len(starts) - 1
    return _case(
        tokens,
        *gdn.make_delta_inputs(maker, tokens, (2, 4), (64, 64)),
        gdn.make_states(maker, count + 1, 4, (64, 64)),
        maker.tensor(starts, dtype=torch.int32),
        gdn.make_slots(maker, count, count + 1, {}),
        maker.tensor([True] * count),
    )


def fused_recurrent_gated_delta_rule(maker: InputMaker, tokens: int) -> Case:
    return _case(
        tokens,
        *gdn.make_delta_inputs(maker, tokens, (2, 4), (32, 32)),
        gdn.make_states(maker, tokens + 1, 4, (32, 32)),
        gdn.make_slots(maker, tokens, tokens + 1, {}),
    )


def apply_repetition_penalties(maker: InputMaker, tokens: int) -> Case:
    seen = maker.integers(0, 10, 2, tokens, 2000) < 2
    return _case(tokens, maker.normal(tokens, 2000, scale=5.0), seen[0], seen[1], maker.uniform(0.5, 2.0, tokens))


def apply_top_k_top_p(maker: InputMaker, tokens: int) -> Case:
    logits, top_k = maker.normal(tokens, 1000, scale=4.0), maker.integers(1, 1001, tokens)
    # In the middle of the share of one of the best tokens, so that no rounding decides.
    ranked = logits.double().sort(-1, descending=True).values
    kept = top_k.unsqueeze(1) > maker.tensor(range(1000))
    shares = ranked.masked_fill(~kept, float("-inf")).softmax(-1)
    place = maker.integers(0, 8, tokens).minimum(top_k - 1).long().unsqueeze(1)
    top_p = (shares.cumsum(-1) - shares / 2).gather(1, place).squeeze(1)
    return _case(tokens, logits, top_k, top_p.to(_wide(maker)))


def per_token_group_quant_fp8(maker: InputMaker, tokens: int) -> Case:
    return _case(tokens, maker.normal(tokens, 2048), 128)


def scaled_mm(maker: InputMaker, tokens: int) -> Case:
    import torch

    a = maker.normal(tokens, 512, scale=30.0, dtype=torch.float8_e4m3fn)
    b = maker.normal(256, 512, scale=30.0, dtype=torch.float8_e4m3fn).t()
    scales = (maker.uniform(0.002, 0.01, *shape, dtype=_wide(maker)) for shape in ((tokens, 1), (1, 256)))
    return _case(tokens, a, b, *scales, str(maker.dtype).removeprefix("torch."))


def _wide(maker: InputMaker) -> torch.dtype:
    import torch

    return torch.promote_types(maker.dtype, torch.float32)


def _lengths(tokens: int) -> list[int]:
    """Where up to three requests begin that share the tokens unevenly, and where the last one ends."""
    return sorted({0, tokens // 7, tokens // 2, tokens})
