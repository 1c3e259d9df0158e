"""The backend for vLLM: what its metadata says, which calls the kernel serves, and a step from the cache to the result.

vLLM takes seconds to import; it is imported with the first test, in the process that launches kernels.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, INTERPRETED, maker

from vllm_fl.flagos import availability
from vllm_fl.flagos.backends import attention_backend

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16


@pytest.fixture
def attention(device: str) -> ModuleType:
    return importlib.import_module("vllm_fl.flagos.attention")


def make_builder(attention: ModuleType, mode: str = "FULL_AND_PIECEWISE") -> Any:
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    sizes = {"get_num_attention_heads": HEADS, "get_num_kv_heads": KV_HEADS}
    model = SimpleNamespace(get_head_size=lambda: SIZE, rswa_window=None)
    for name, size in sizes.items():
        setattr(model, name, lambda parallel, size=size: size)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=[1, 2, 4], static_forward_context={}
    )
    config = SimpleNamespace(model_config=model, parallel_config=None, compilation_config=compilation)
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
    return attention.FlagosAttentionBackend.get_builder_cls()(spec, [], config, torch.device(DEVICE))


def common(queries: list[int], lengths: list[int], tokens: int | None = None, **changes: Any) -> Any:
    """Metadata of a batch, as vLLM's runners make it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        num_reqs=len(queries),
        num_actual_tokens=tokens or sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=torch.arange(1, 1 + 4 * len(queries), dtype=torch.int32, device=DEVICE).view(-1, 4),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=DEVICE),
        **changes,
    )


def make_impl(attention: ModuleType, **changes: Any) -> Any:
    arguments = {
        "num_heads": HEADS, "head_size": SIZE, "scale": 0.3, "num_kv_heads": KV_HEADS, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    return attention.FlagosAttentionBackend.get_impl_cls()(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("queries", "lengths", "tokens", "decodes"),
    [
        ([1, 1, 1], [5, 9, 1], None, 3),
        ([1, 1, 0, 0], [5, 9, 0, 0], 4, 4),  # padded for a graph: requests and tokens
        ([1, 1, 0, 0], [5, 9, 0, 0], 2, 2),  # padding without a row
        ([1, 1, 7, 3], [5, 9, 7, 3], None, 2),
        ([7, 1], [7, 8], None, 0),
        ([3, 2], [3, 2], None, 0),
    ],
    ids=str,
)
def test_decodes_are_counted(
    attention: ModuleType, queries: list[int], lengths: list[int], tokens: int | None, decodes: int
) -> None:
    metadata = make_builder(attention).build(0, common(queries, lengths, tokens))
    assert metadata.num_decodes == decodes


@pytest.mark.parametrize(("mode", "decodes"), [("FULL_AND_PIECEWISE", 2), ("FULL_DECODE_ONLY", 2), ("FULL", 0)])
def test_graphs_of_mixed_batches_take_no_decode_path(attention: ModuleType, mode: str, decodes: int) -> None:
    """Captured with one token a request, such a graph is replayed with others."""
    metadata = make_builder(attention, mode).build_for_cudagraph_capture(common([1, 1], [9, 9]))
    assert metadata.num_decodes == decodes


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("queries", [[1, 1, 5], [1, 1, 1]], ids=["mixed", "decodes"])
def test_a_step(attention: ModuleType, window: int | None, queries: list[int]) -> None:
    """Write the step's tokens into the cache, then attend."""
    make, lengths = maker(), [20, 33, 9]
    batch = common(queries, lengths)
    total = sum(queries)
    cache = make.normal(13, PAGE, KV_HEADS, 2 * SIZE).transpose(1, 2)
    query, key, value = (make.normal(total, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    positions = [(r, p) for r in range(3) for p in range(lengths[r] - queries[r], lengths[r])]
    slots = [int(batch.block_table_tensor[r, p // PAGE]) * PAGE + p % PAGE for r, p in positions]
    impl, output = make_impl(attention, sliding_window=window), torch.empty_like(query)
    impl.do_kv_cache_update(None, key, value, cache, torch.tensor(slots, device=DEVICE))
    metadata = make_builder(attention).build(0, batch)
    assert impl.forward(None, query, key, value, cache, metadata, output) is output
    for token, (r, p) in enumerate(positions):
        rows = cache[batch.block_table_tensor[r].long()].transpose(1, 2).flatten(0, 1)
        assert torch.equal(rows[p], torch.cat([key[token], value[token]], -1)), "the cache was not written"
        seen = rows[max(p - window + 1, 0) if window else 0 : p + 1].repeat_interleave(HEADS // KV_HEADS, 1)
        weights = (torch.einsum("hd,nhd->hn", query[token], seen[..., :SIZE]) * 0.3).softmax(1)
        want = torch.einsum("hn,nhd->hd", weights, seen[..., SIZE:])
        torch.testing.assert_close(output[token], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_an_encoder(attention: ModuleType, window: int | None) -> None:
    """Two requests of 4 and 6 tokens, each of which sees both sides."""
    make, lengths = maker(), [4, 6]
    query, key, value = (make.normal(10, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    impl = make_impl(attention, attn_type="encoder_only", sliding_window=window)
    metadata = make_builder(attention).build(0, common(lengths, lengths, causal=False))
    cache = torch.empty(0, device=DEVICE)
    output = torch.empty_like(query)
    impl.do_kv_cache_update(None, key, value, cache, torch.zeros(10, dtype=torch.int64, device=DEVICE))
    assert impl.forward(None, query, key, value, cache, metadata, output) is output
    at = torch.arange(10)
    seen = (at < 4)[:, None] == (at < 4)
    if window is not None:
        seen &= (at[:, None] - at).abs() < window
    k, v = (x.cpu().repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.cpu(), k) * 0.3
    want = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(output.cpu(), want, rtol=1e-5, atol=1e-5)


LAYERS = {
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "quantised cache": {"kv_cache_dtype": "fp8"},
    "chunks": {"chunk_lookback": 0},
    "encoder with sinks": {"attn_type": "encoder_only", "sinks": torch.zeros(HEADS)},
    "cross-attention": {"attn_type": "encoder_decoder"},
    "large heads": {"head_size": 512},
}
STEPS = {
    "not causal": {"causal": False},
    "causal by request": {"causal": torch.tensor([True, False])},
    "ranges": {"mm_prefix_range_tensor": torch.zeros(2, 1, 2)},
    "reference window": {"rswa_prefix_lens": torch.zeros(2)},
}


@pytest.mark.parametrize("what", [*LAYERS, *STEPS, "batch invariance", "profiling", "quantised result"])
def test_what_stays_with_vllm(attention: ModuleType, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    base = attention.TritonAttentionImpl
    monkeypatch.setattr(base, "forward", lambda self, *args: calls.append(args) or "vLLM's")
    monkeypatch.setattr(base, "do_kv_cache_update", lambda self, *args: calls.append(args))
    monkeypatch.setattr(attention, "paged_attention", lambda *args: pytest.fail("our kernel was called"))
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", what == "batch invariance", raising=False)
    impl = make_impl(attention, **LAYERS.get(what, {}))
    metadata = make_builder(attention).build(0, common([1, 1], [9, 9]))
    for name, value in STEPS.get(what, {}).items():
        setattr(metadata, name, value)
    scale = torch.ones(1) if what == "quantised result" else None
    x, cache = torch.zeros(2, HEADS, SIZE), torch.zeros(9, KV_HEADS, PAGE, 2 * SIZE)
    arguments = ("layer", x, x, x, cache, None if what == "profiling" else metadata, x, scale, None)
    assert impl.forward(*arguments) == "vLLM's"
    assert calls == [arguments]
    if what in LAYERS:
        update = ("layer", x, x, cache, torch.zeros(2))
        impl.do_kv_cache_update(*update)
        assert calls[1:] == [update]


def test_the_cache_is_cut_once(attention: ModuleType) -> None:
    impl, cache = make_impl(attention), torch.zeros(9, KV_HEADS, PAGE, 2 * SIZE, device=DEVICE)
    assert impl._split(cache)[0] is impl._split(cache)[0]
    other = torch.ones_like(cache)
    assert impl._split(other)[1].data_ptr() == other[..., SIZE:].data_ptr()


def test_the_operator_names_the_backend(attention: ModuleType) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    backend = resolve_obj_by_qualname(attention_backend())
    assert backend is attention.FlagosAttentionBackend
    assert backend.get_name() == "TRITON_ATTN"  # what vLLM's special cases look for
    assert resolve_obj_by_qualname(attention_backend(use_mla=True)).is_mla()
    with pytest.raises(NotImplementedError) as caught:
        attention_backend(use_mla=True, use_sparse=True)
    assert str(caught.value) == "flagos has no backend for sparse attention"


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_vllm_has_no_interpreter(device: str) -> None:
    answer = availability.triton_attention()
    assert (answer.ok, answer.reason) == (
        False,
        "vLLM's Triton attention does not run in Triton's interpreter (TRITON_INTERPRET)",
    )
