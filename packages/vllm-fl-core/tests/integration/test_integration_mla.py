"""Latent attention in vLLM's layer, against heads with keys and values of their own, written out in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm_fl.integration.mla import MLABackend, MLAImpl, MLAMetadata, MLAMetadataBuilder, NoPrefillBackend

HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 3, 8, 4, 6, 16, 4


class Projection(nn.Module):
    """What the layer reads of the linear layer from latents to keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), LATENT), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


def metadata(common: CommonAttentionMetadata) -> MLAMetadata:
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.float32)
    return MLAMetadataBuilder(spec, ["layer"], None, torch.device("cpu")).build(0, common)


def batch(requests: Sequence[tuple[int, int]], padding: int = 0, **changes: Any) -> CommonAttentionMetadata:
    """A step of requests of (cached tokens, new tokens); `padding` rows belong to no request."""
    new = torch.tensor([0, *(new for _, new in requests)], dtype=torch.int32)
    start = new.cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([cached + new for cached, new in requests], dtype=torch.int32)
    width = -(-int(lengths.max()) // PAGE)
    table = torch.randperm(len(requests) * width).int().view(len(requests), width)
    positions = [range(cached, cached + new) for cached, new in requests]
    slots = [table[r, p // PAGE] * PAGE + p % PAGE for r, found in enumerate(positions) for p in found]
    return CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=lengths,
        num_reqs=len(requests),
        num_actual_tokens=int(start[-1]) + padding,
        max_query_len=int(new.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
        **{"causal": True, **changes},
    )


@pytest.fixture
def layer(vllm_config: Any) -> Any:
    """vLLM's layer, with the backend that the platform names."""
    torch.manual_seed(0)
    made = MLAAttention(
        num_heads=HEADS,
        scale=0.4,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        kv_b_proj=Projection(),
        prefix="layer",
    )
    made.process_weights_after_loading(torch.float32)
    return made


def by_hand(layer: Any, query: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
    """One sequence from its beginning, all keys and values expanded: [T, HEADS * VALUE] float64."""
    weight = layer.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, LATENT)
    both = torch.einsum("hdl,tl->thd", weight, latent.double())
    keys = torch.cat((both[..., :NOPE], rope.double().expand(-1, HEADS, -1)), -1)
    scores = 0.4 * torch.einsum("qhd,khd->hqk", query.double(), keys)
    hidden = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, both[..., NOPE:]).flatten(1)


def test_chunks_decodes_and_mixtures_are_plain_attention(layer: Any, spy: Any) -> None:
    """Three requests over three steps, each step one packed batch with two rows of padding."""
    attended, written = spy("mla_attention"), spy("concat_and_cache_mla")
    lengths, steps = (9, 7, 12), [((0, 5), (0, 6), (0, 3)), ((5, 1), (6, 1), (3, 8)), ((6, 3), (11, 1))]
    requests_of = [(0, 1, 2), (0, 1, 2), (0, 2)]
    sequences = [(torch.randn(n, HEADS, NOPE + ROPE), torch.randn(n, LATENT), torch.randn(n, 1, ROPE)) for n in lengths]
    tables = torch.randperm(12).int().view(3, 4)
    cache = torch.full((12, PAGE, LATENT + ROPE), float("nan"))
    outputs: list[list[Tensor]] = [[], [], []]
    for spans, requests in zip(steps, requests_of, strict=True):
        common = batch(spans, padding=2)
        common.block_table_tensor = tables[list(requests)]
        places = [(r, p) for r, (cached, new) in zip(requests, spans, strict=True) for p in range(cached, cached + new)]
        common.slot_mapping = torch.tensor([*(tables[r, p // PAGE] * PAGE + p % PAGE for r, p in places), -1, -1])
        parts = (torch.stack([sequences[r][part][p] for r, p in places]) for part in range(3))
        query, latent, rope = (torch.cat([part, torch.full_like(part[:2], 7.0)]) for part in parts)
        step = metadata(common)
        layer.impl.do_kv_cache_update(latent, rope, cache, common.slot_mapping, "auto", torch.ones(()))
        output = torch.full((len(query), HEADS * VALUE), float("nan"))
        layer.forward_impl(query, latent, rope, cache, step, output=output)
        assert (output[-2:] == 0).all()
        for r, rows in zip(requests, output.split([new for _, new in spans] + [2])[:-1], strict=True):
            outputs[r].append(rows)
    for sequence, found in zip(sequences, outputs, strict=True):
        rows = torch.cat(found)
        wanted = by_hand(layer, *(part[: len(rows)] for part in sequence))
        torch.testing.assert_close(rows.double(), wanted, rtol=2e-5, atol=2e-5)
    assert (attended.calls, written.calls) == (3, 3)


def test_the_platform_names_the_backend(layer: Any) -> None:
    assert layer.attn_backend is MLABackend
    assert type(layer.impl) is MLAImpl
    assert MLABackend.get_name() == "CUSTOM"
    assert MLABackend.get_kv_cache_shape(7, 16, 1, 20) == (7, 16, 20)
    assert MLABackend.get_kv_cache_stride_order() == (0, 1, 2)
    assert MLABackend.get_kv_cache_stride_order(True) == (1, 0, 2, 3)
    (size,) = MLABackend.get_supported_kernel_block_sizes()
    assert isinstance(size, MultipleOf)
    assert MLABackend.supports_block_size(7)


def test_vllm_takes_ours_for_the_prefill_kernel_that_it_cannot_have(layer: Any, vllm_config: Any) -> None:
    assert current_platform.get_device_capability() is None
    assert get_mla_prefill_backend(vllm_config) is NoPrefillBackend
    assert type(layer.prefill_backend) is NoPrefillBackend
    with pytest.raises(NotImplementedError, match=r"^latent attention has no prefill apart from mla_attention$"):
        layer.prefill_backend.run_prefill_new_tokens()


def test_metadata_of_a_mixed_batch() -> None:
    found = metadata(batch([(4, 1), (9, 1), (0, 5)], padding=1))
    assert (found.single_tokens, found.max_query_len) == (2, 5)
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills, found.prefill) == (3, 8, 0, None)
    assert found.decode is not None
    assert metadata(batch([(0, 5), (4, 1)])).single_tokens == 0


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])], ids=str)
def test_other_masks_are_refused(causal: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"^latent attention is causal; this model asks for another mask$"):
        metadata(batch([(4, 1), (0, 5)], causal=causal))


def make_impl(**changes: Any) -> MLAImpl:
    arguments = {"num_heads": HEADS, "head_size": LATENT + ROPE, "scale": 0.4, "kv_lora_rank": LATENT}
    return MLAImpl(**{**arguments, "kv_cache_dtype": "auto", "sliding_window": None, **changes})


def test_profiling_has_no_cache() -> None:
    make_impl().do_kv_cache_update(torch.zeros(2, 16), torch.zeros(2, 1, 4), torch.tensor([]), None, "auto", None)


def test_what_latent_attention_does_not_know_is_refused() -> None:
    with pytest.raises(NotImplementedError) as caught:
        make_impl(sliding_window=5, logits_soft_cap=2.0)
    assert str(caught.value) == "latent attention does not know the layer's arguments logits_soft_cap, sliding_window"
    with pytest.raises(NotImplementedError) as caught:
        make_impl(kv_cache_dtype="fp8")
    assert str(caught.value) == (
        "latent attention has no KV cache of dtype 'fp8'; --kv-cache-dtype may be auto, float16, bfloat16"
    )
