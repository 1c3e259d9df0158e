"""The vLLM side of the paged attention: metadata, cache update, encoders, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_oracle import Case, attention, make_case
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_fl_reference.attention import (
    PagedAttentionBackend,
    PagedAttentionImpl,
    PagedAttentionMetadata,
    PagedAttentionMetadataBuilder,
)
from vllm_fl_reference.paged_attention import AttentionOptions

REQUESTS = [(30, 1), (61, 1), (0, 1), (0, 20), (16, 7)]


def build(case: Case, **changes: Any) -> PagedAttentionMetadata:
    """Metadata of a case, with two padding tokens and one padding request, as vLLM makes them for graphs."""
    step = case.step
    _, heads, block_size, width = case.cache.shape
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=width // 2, dtype=case.cache.dtype)
    builder = PagedAttentionMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))
    start = torch.tensor([*step.query_start, step.query_start[-1]], dtype=torch.int32)
    lengths = torch.tensor([*step.seq_lens, 0], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=step.num_tokens + 2,
        max_query_len=int(start.diff().max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.cat([step.block_table, torch.zeros_like(step.block_table[:1])]),
        slot_mapping=torch.cat([case.slots, torch.tensor([-1, -1])]),
        **{"causal": step.causal, **changes},
    )
    return builder.build(0, common)


def make_impl(case: Case, **changes: Any) -> PagedAttentionImpl:
    arguments = {"num_heads": case.query.shape[1], "head_size": case.query.shape[2], "scale": 0.35}
    return PagedAttentionImpl(**{**arguments, "num_kv_heads": case.cache.shape[1], **changes})


def padded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, torch.full_like(tensor[:1], float("nan")).expand(2, -1, -1)])


def serve(case: Case, impl: PagedAttentionImpl, metadata: PagedAttentionMetadata) -> torch.Tensor:
    """Write the new tokens into the cache, then attend; with padding at the end of the batch."""
    query, key, value = (padded(item) for item in (case.query, case.key, case.value))
    output = torch.full_like(query, float("nan"))
    impl.do_kv_cache_update(None, key, value, case.cache, metadata.slot_mapping)
    returned = impl.forward(None, query, key, value, case.cache, metadata, output)
    assert returned is output
    return output


@pytest.mark.parametrize("layout", ["tokens first", "heads first", "uneven blocks"])
def test_a_mixed_batch(layout: str) -> None:
    case = make_case(REQUESTS, layout=layout)
    output = serve(case, make_impl(case), build(case))
    torch.testing.assert_close(output[:-2].double(), attention(case, AttentionOptions(0.35)), atol=2e-5, rtol=2e-5)
    assert (output[-2:] == 0).all()


def test_window_soft_cap_sinks_and_slopes_reach_the_computation() -> None:
    case = make_case(REQUESTS)
    sinks, slopes = torch.tensor([0.5, -1.0, 2.0, 0.0]), [0.1, 0.2, 0.3, 0.4]
    impl = make_impl(case, sliding_window=9, logits_soft_cap=3.0, sinks=sinks, alibi_slopes=slopes)
    options = AttentionOptions(0.35, 9, 3.0, sinks, torch.tensor(slopes))
    torch.testing.assert_close(
        serve(case, impl, build(case))[:-2].double(), attention(case, options), atol=2e-5, rtol=2e-5
    )


def test_a_soft_cap_of_zero_is_none() -> None:
    """vLLM's models say 0 for no cap."""
    case = make_case(REQUESTS)
    output = serve(case, make_impl(case, logits_soft_cap=0.0), build(case))
    torch.testing.assert_close(output[:-2].double(), attention(case, AttentionOptions(0.35)), atol=2e-5, rtol=2e-5)


def test_causal_may_be_a_tensor_of_requests() -> None:
    flags = [True, False, True, False, True]
    case = make_case(REQUESTS, causal=flags)
    metadata = build(case, causal=torch.tensor([*flags, True]))
    output = serve(case, make_impl(case), metadata)
    torch.testing.assert_close(output[:-2].double(), attention(case, AttentionOptions(0.35)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_encoders_have_no_cache(kind: str) -> None:
    case = make_case([(0, 5), (0, 12), (0, 1)], causal=False)
    impl = make_impl(case, attn_type=kind)
    metadata = build(case)
    before = case.cache.clone()
    output = serve(case, impl, metadata)
    torch.testing.assert_close(output[:-2].double(), attention(case, AttentionOptions(0.35)), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.cache, before, equal_nan=True)
    impl.forward(None, case.query, case.key, case.value, torch.empty(0), metadata, output[:-2])


def test_a_layer_reads_the_cache_of_another_one() -> None:
    """KV sharing: vLLM binds the target's cache and does not ask for an update."""
    case = make_case(REQUESTS)
    metadata = build(case)
    first = make_impl(case)
    expected = serve(case, first, metadata)
    sharing = make_impl(case, kv_sharing_target_layer_name="layer")
    output = torch.empty_like(case.query)
    sharing.forward(None, case.query, None, None, case.cache, metadata, output)
    torch.testing.assert_close(output, expected[:-2])


def test_profiling_gives_zeros_and_touches_no_cache() -> None:
    case = make_case(REQUESTS)
    impl, nothing = make_impl(case), torch.tensor([])
    impl.do_kv_cache_update(None, case.key, case.value, nothing, case.slots)
    output = torch.full_like(case.query, float("nan"))
    assert impl.forward(None, case.query, case.key, case.value, nothing, None, output) is output
    assert (output == 0).all()


def test_a_new_cache_of_the_same_layer_is_noticed() -> None:
    case, other = make_case(REQUESTS), make_case(REQUESTS, seed=1)
    impl = make_impl(case)
    serve(case, impl, build(case))
    output = serve(other, impl, build(other))
    torch.testing.assert_close(output[:-2].double(), attention(other, AttentionOptions(0.35)), atol=2e-5, rtol=2e-5)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(NotImplementedError) as caught:
        make_impl(make_case(REQUESTS), attn_type=AttentionType.ENCODER_DECODER)
    assert str(caught.value) == (
        "reference attention has no cross-attention (encoder-decoder models); choose another attention backend"
    )
    assert not PagedAttentionBackend.supports_attn_type(AttentionType.ENCODER_DECODER)


def test_a_cache_of_eight_bits_is_refused() -> None:
    with pytest.raises(NotImplementedError) as caught:
        make_impl(make_case(REQUESTS), kv_cache_dtype="fp8")
    assert str(caught.value) == (
        "reference attention has no KV cache of dtype 'fp8'; --kv-cache-dtype may be auto, float16, bfloat16"
    )


def test_an_unknown_argument_is_refused_and_a_default_is_not() -> None:
    case = make_case(REQUESTS)
    make_impl(case, chunk_lookback=-1, use_alibi_sqrt=False)
    with pytest.raises(NotImplementedError) as caught:
        make_impl(case, chunk_lookback=4, block_m=None)
    assert str(caught.value) == "reference attention does not know the layer's arguments chunk_lookback"


def test_quantised_output_is_refused() -> None:
    case = make_case(REQUESTS)
    with pytest.raises(NotImplementedError, match=r"^reference attention does not quantise its output$"):
        make_impl(case).forward(
            None, case.query, case.key, case.value, case.cache, build(case), case.query, torch.ones(1)
        )


def test_partly_bidirectional_batches_are_refused() -> None:
    case = make_case(REQUESTS)
    build(case, mm_req_doc_ranges={0: []})
    with pytest.raises(NotImplementedError, match=r"prefix LM"):
        build(case, mm_req_doc_ranges={0: [], 3: [(2, 5)]})
    with pytest.raises(NotImplementedError, match=r"R-SWA"):
        build(case, rswa_prefix_lens=torch.zeros(6))


def test_what_the_backend_tells_vllm() -> None:
    backend = PagedAttentionBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(7, 16, 2, 8) == (7, 2, 16, 16)
    assert backend.get_kv_cache_block_dim(16, 2, 8) == 0
    assert backend.indexes_kv_by_block_stride()
    assert backend.supports_block_size(16)
    assert backend.supports_block_size(7)
    assert backend.get_preferred_block_size(16) == 16
    sizes = backend.get_supported_kernel_block_sizes("any spec")
    assert sizes[0] == 16
    assert isinstance(sizes[1], MultipleOf)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert backend.supports_dtype(dtype)
    assert [name for name in ("auto", "float16", "bfloat16", "fp8") if backend.supports_kv_cache_dtype(name)] == [
        "auto",
        "float16",
        "bfloat16",
    ]
    reasons = backend.validate_configuration(
        head_size=64,
        dtype=torch.float32,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=True,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type=AttentionType.DECODER,
        has_sliding_window=True,
        use_non_causal=True,
    )
    assert reasons == []


def test_the_memory_order_is_the_fast_one() -> None:
    backend = PagedAttentionBackend
    shape, order = backend.get_kv_cache_shape(7, 16, 2, 8), backend.get_kv_cache_stride_order()
    memory = torch.empty([shape[axis] for axis in order])
    cache = memory.permute([order.index(axis) for axis in range(4)])
    assert cache.shape == shape
    assert cache.transpose(1, 2).is_contiguous()
    layered = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert [(3, *shape)[axis] for axis in layered] == [7, 3, 16, 2, 16]
