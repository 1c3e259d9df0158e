"""The paged attention, through the simulation, against one request at a time in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attention_oracle
import pytest
import torch
from torch import Tensor

from vllm_fl_ascend.fused_attention import Step, make_pool
from vllm_fl_reference.paged_attention import AttentionOptions

pytest.importorskip("vllm")

BLOCK = 128
#: (cached tokens, query tokens) of each request.
BATCHES = {
    "decodes": [(5, 1), (127, 1), (128, 1), (300, 1)],
    "prefill": [(0, 150)],
    "chunk": [(128, 40)],
    "prefills": [(0, 1), (0, 130), (200, 3)],
    "mixture": [(9, 1), (130, 1), (0, 20), (140, 7), (3, 1)],
    "no request": [],
}
#: Memory orders of vLLM's cache; the last two are those of several layers in a block, and of hybrid models.
LAYOUTS = ("tokens first", "heads first", "several layers", "padded blocks")


@pytest.fixture(autouse=True)
def _platform(simulated_npu: Any) -> None:
    """torch_npu is there when the attention is imported."""


def make_cache(blocks: int, heads: int, width: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[blocks, heads, 128, width] of NaN, which is read where nothing was written."""
    if layout != "padded blocks":
        return attention_oracle.make_cache(blocks, heads, BLOCK, width, dtype, layout)
    page = BLOCK * heads * width
    memory = torch.full((blocks, page + page // 2), float("nan"), dtype=dtype)
    return memory.as_strided((blocks, heads, BLOCK, width), (page + page // 2, width, heads * width, 1))


def make_impl(**changes: Any) -> Any:
    from vllm_fl_ascend.attention import AscendAttentionImpl

    arguments = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **changes}
    return AscendAttentionImpl(**arguments)


def run(case: attention_oracle.Case, cache: Tensor, impl: Any, extra_rows: int = 3) -> Tensor:
    """The batch after its cached tokens have been written, as an earlier step would have."""
    from vllm_fl_ascend.attention import AscendAttentionMetadata

    step, table = case.step, case.step.block_table
    assert table is not None
    for index, (keys, values) in enumerate(case.sequences):
        cached = len(keys) - (step.query_start[index + 1] - step.query_start[index])
        slots = torch.tensor([int(table[index, p // BLOCK]) * BLOCK + p % BLOCK for p in range(cached)])
        earlier = Step([cached], [cached], table[index : index + 1], slots)
        if cached:
            query = torch.zeros(cached, *case.query.shape[1:], dtype=case.query.dtype)
            impl.forward(
                None, query, keys[:cached], values[:cached], cache, AscendAttentionMetadata(earlier), query.clone()
            )
    metadata = AscendAttentionMetadata(
        Step(step.query_start[1:], step.seq_lens, table, case.slots, causal=bool(step.causal))
    )
    output = torch.full((len(case.query) + extra_rows, *case.query.shape[1:]), 7.0, dtype=case.query.dtype)
    assert impl.forward(None, case.query, case.key, case.value, cache, metadata, output) is output
    assert not output[len(case.query) :].any()
    return output[: len(case.query)]


def compare(result: Tensor, case: attention_oracle.Case, scale: float = 0.125) -> None:
    expected = attention_oracle.attention(case, AttentionOptions(scale, None, None, None, None))
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_batches(requests: list[tuple[int, int]], layout: str, dtype: torch.dtype) -> None:
    case = attention_oracle.make_case(requests, head_size=64, block_size=BLOCK, dtype=dtype)
    compare(run(case, make_cache(len(case.cache), 2, 128, dtype, layout), make_impl()), case)


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 16), ((8, 1), 128), ((3, 3), 48), ((2, 1), 256)])
def test_heads(heads: tuple[int, int], size: int) -> None:
    case = attention_oracle.make_case(
        BATCHES["mixture"], heads=heads, head_size=size, block_size=BLOCK, dtype=torch.float16
    )
    impl = make_impl(num_heads=heads[0], num_kv_heads=heads[1], head_size=size, scale=0.2)
    compare(run(case, make_cache(len(case.cache), heads[1], 2 * size, torch.float16, "tokens first"), impl), case, 0.2)


def test_not_causal() -> None:
    case = attention_oracle.make_case(
        BATCHES["mixture"], head_size=64, block_size=BLOCK, dtype=torch.float16, causal=False
    )
    compare(run(case, make_cache(len(case.cache), 2, 128, torch.float16, "tokens first"), make_impl()), case)


def test_one_block() -> None:
    """PyTorch does not say how far the next block would be."""
    cache = torch.zeros(1, 2, BLOCK, 128, dtype=torch.float16)
    pool = make_pool(cache, 64)
    assert (tuple(pool.keys.shape), pool.step) == ((1, BLOCK, 128), 2)
    assert pool.values.data_ptr() - pool.keys.data_ptr() == BLOCK * 128 * 2


def test_a_page_stays_what_vllm_takes_it_for() -> None:
    """To copy a block as vLLM sees it copies its keys and values, and nothing else."""
    case = attention_oracle.make_case([(130, 1)], head_size=64, block_size=BLOCK, dtype=torch.float16)
    cache = make_cache(len(case.cache), 2, 128, torch.float16, "heads first")
    impl = make_impl()
    first = run(case, cache, impl)
    table = case.step.block_table
    assert table is not None
    free = next(b for b in range(1, len(cache)) if b not in table[0, :2].tolist())
    cache[free] = cache[int(table[0, 0])]
    cache[int(table[0, 0])] = 0
    table[0, 0] = free
    metadata = SimpleNamespace(step=Step([1], [131], table, case.slots))
    assert torch.equal(impl.forward(None, case.query, None, None, cache, metadata, first.clone()), first)


def test_profiling_run() -> None:
    output = torch.ones(3, 4, 64, dtype=torch.float16)
    assert not make_impl().forward(None, output, output, output, torch.tensor([]), None, output.clone()).any()


def test_layer_that_reads_another_ones_cache() -> None:
    case = attention_oracle.make_case([(0, 20)], head_size=64, block_size=BLOCK, dtype=torch.float16)
    cache = make_cache(len(case.cache), 2, 128, torch.float16, "tokens first")
    written = run(case, cache, make_impl())
    other = make_impl(kv_sharing_target_layer_name="layers.0")
    case.key.fill_(9)
    assert torch.equal(run(case, cache, other), written)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sliding_window": 64}, "sliding windows"),
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "a cap on the scores"),
        ({"attn_type": "encoder_only"}, "attention of type 'encoder_only'"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of dtype 'fp8' (auto, float16, bfloat16)"),
        ({"head_size": 72}, "heads of size 72 (multiples of 16 up to 512)"),
        ({"num_heads": 130}, "130 query heads for 2 heads of keys (at most 64 for one)"),
        ({"num_heads": 128, "head_size": 512}, "128 heads of size 512 (65535 entries at most)"),
        ({"sinks": torch.zeros(4)}, "the argument 'sinks'"),
    ],
)
def test_layer_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        make_impl(**changes)
    assert str(caught.value) == (
        f"the Ascend attention does not have {text}; "
        'VLLM_FL_PER_OP="attention_backend=reference" takes the slower attention in PyTorch'
    )


def test_quantised_output_refused() -> None:
    x = torch.ones(1, 4, 64, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=r"^the Ascend attention does not quantise its output$"):
        make_impl().forward(None, x, x, x, torch.tensor([]), None, x, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            torch.zeros(2, 3, BLOCK, 128).transpose(0, 1),
            "the Ascend attention has no KV cache of shape (3, 2, 128, 128) and strides (16384, 49152, 128, 1): the"
            " block has to be the outermost dimension in memory",
        ),
        (
            torch.empty(1 << 17, 2, BLOCK, 128, dtype=torch.float16, device="meta"),
            "torch_npu's attention takes 2147483647 entries a layer, and 65535 a token, at most; this KV cache has"
            " 4294950912 and 128: make it smaller (--num-gpu-blocks-override, --kv-cache-memory-bytes)",
        ),
    ],
    ids=["heads outermost", "too large"],
)
def test_cache_refused(cache: Tensor, message: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        make_pool(cache, 64)
    assert str(caught.value) == message
