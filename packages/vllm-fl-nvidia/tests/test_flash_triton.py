"""Which steps the Triton kernel takes from FlashAttention. No kernel runs: there is no device."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16


@pytest.fixture
def backend() -> ModuleType:
    return importlib.import_module("vllm_fl_nvidia.flash_triton")


@pytest.fixture
def schedules(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step so far was built without FlashAttention's schedule."""
    builds: list[bool] = []
    build = backend.FlashAttentionMetadataBuilder.build

    def record(self: Any, common_prefix_len: int, batch: Any, fast_build: bool = False) -> Any:
        builds.append(fast_build)
        return build(self, common_prefix_len, batch, fast_build)

    monkeypatch.setattr(backend.FlashAttentionMetadataBuilder, "build", record)
    return builds


def build(
    backend: ModuleType, queries: list[int], tokens: int | None = None, mode: str = "FULL_AND_PIECEWISE",
    prefix: int = 0,
) -> Any:  # fmt: skip
    """The metadata of a step of requests with so many tokens; `tokens`: padded to so many."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: SIZE,
        rswa_window=None,
        is_mm_prefix_lm=False,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], max_cudagraph_capture_size=8),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16)
    builder = backend.FlashTritonBackend.get_builder_cls()(spec, [], config, torch.device("cpu"))
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((len(queries),), 33, dtype=torch.int32),
        num_reqs=len(queries),
        num_actual_tokens=tokens or sum(queries),
        max_query_len=max(queries),
        max_seq_len=33,
        block_table_tensor=torch.arange(4 * len(queries), dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
    )
    return builder.build(prefix, batch)


@pytest.mark.parametrize(
    ("queries", "options", "decodes"),
    [
        ([1, 1, 1], {}, 3),
        ([1, 1, 0, 0], {"tokens": 4}, 4),  # padded for a graph: requests and tokens
        ([1, 1, 0, 0], {"tokens": 2}, 2),  # padding without a row
        ([1, 1, 7], {}, 0),
        ([2, 2], {}, 0),  # speculative decoding
        ([1, 1, 1], {"mode": "FULL_DECODE_ONLY"}, 3),
        ([1, 1, 1], {"mode": "FULL"}, 0),
        ([1, 1, 1], {"prefix": 16}, 0),
    ],
    ids=str,
)
def test_steps(
    backend: ModuleType, schedules: list[bool], queries: list[int], options: dict[str, Any], decodes: int
) -> None:
    assert build(backend, queries, **options).num_decodes == decodes
    assert schedules == [decodes > 0]


def test_context_parallelism_stays_with_flash_attention(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_dcp_group", lambda: SimpleNamespace(world_size=2, rank_in_group=0)
    )
    from vllm.config import CUDAGraphMode

    made = SimpleNamespace(dcp_world_size=2, vllm_config=SimpleNamespace())
    made.vllm_config.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE)
    monkeypatch.setattr(backend.FlashAttentionMetadataBuilder, "__init__", lambda self: vars(self).update(vars(made)))
    assert backend.FlashTritonMetadataBuilder()._splits_steps is False


@pytest.mark.parametrize(
    ("queries", "layer", "step", "ours"),
    [
        ([1, 1], {}, {}, True),
        ([1, 1], {"sliding_window": 7, "logits_soft_cap": 30.0}, {}, True),
        ([1, 5], {}, {}, False),
        ([1, 1], {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, {}, False),
        ([1, 1], {"attn_type": "encoder_decoder"}, {}, False),
        ([1, 1], {}, {"causal": False}, False),
        ([1, 1], {}, {"mm_prefix_range_tensor": torch.zeros(2, 1, 2)}, False),
    ],
    ids=str,
)
def test_calls(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, queries: list[int], layer: dict[str, Any],
    step: dict[str, Any], ours: bool,
) -> None:  # fmt: skip
    calls: list[str] = []
    monkeypatch.setattr("vllm_fl.flagos.attention.paged_attention", lambda *args: calls.append("triton"))
    monkeypatch.setattr(backend.FlashAttentionImpl, "forward", lambda *args: calls.append("flash"))
    arguments = {
        "num_heads": HEADS, "head_size": SIZE, "scale": 0.3, "num_kv_heads": KV_HEADS, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", **layer,
    }  # fmt: skip
    impl = backend.FlashTritonBackend.get_impl_cls()(**arguments)
    metadata = build(backend, queries)
    for name, value in step.items():
        setattr(metadata, name, value)
    x, cache = torch.zeros(2, HEADS, SIZE), torch.zeros(9, KV_HEADS, PAGE, 2 * SIZE)
    impl.forward(None, x, x, x, cache, metadata, x)
    impl.forward(None, x, x, x, cache, None, x)  # vLLM's profiling run
    assert calls == ["triton" if ours else "flash", "flash"]


def test_vllm_knows_it_as_flash_attention(backend: ModuleType) -> None:
    assert backend.FlashTritonBackend.get_name() == "FLASH_ATTN"
