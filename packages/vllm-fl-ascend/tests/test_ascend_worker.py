"""The shims for vLLM's worker, each applied only where its feature asks for it, and what the worker says and clears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fl.errors import ConfigError

pytest.importorskip("vllm")

CUDA = ("CUDAGraph", "Event", "Stream", "current_stream", "default_stream", "graph", "graph_pool_handle")


def _fails(*args: Any) -> Any:
    raise RuntimeError("no allocator")


@pytest.fixture
def compat(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; what it changes is put back afterwards."""
    from vllm_fl_ascend import compat

    for name in (*CUDA, "is_current_stream_capturing", "set_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    for name in compat._ACCELERATOR_NAMES:
        monkeypatch.setattr(torch.accelerator, name, _fails)
    return compat


def test_cuda_leads_to_the_npu(compat: Any) -> None:
    compat.install()
    assert torch.cuda.Stream is torch.npu.Stream
    assert torch.cuda.CUDAGraph is torch.npu.NPUGraph
    assert torch.cuda.current_stream() is torch.npu.current_stream()
    # Dynamo has a table by function, in which one must not stand under two names.
    assert torch.cuda.current_stream is not torch.npu.current_stream
    event = torch.cuda.Event(blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        event.record()
    assert event.recorded


def test_cuda_stays_where_there_is_cuda(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {name: getattr(torch.cuda, name) for name in CUDA}
    compat.install()
    assert {name: getattr(torch.cuda, name) for name in CUDA} == before


def test_accelerator_is_completed(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where torch_npu does not serve it."""
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device=None: 77)
    compat.install()
    compat.install()
    assert torch.accelerator.get_memory_info("npu:0") == torch.npu.mem_get_info()
    assert torch.accelerator.memory_reserved() == 77
    assert torch.accelerator.memory_stats(0) == {}


@pytest.mark.parametrize(("has_triton", "replaced"), [(True, False), (False, True)])
def test_triton_kernels(compat: Any, monkeypatch: pytest.MonkeyPatch, has_triton: bool, replaced: bool) -> None:
    import vllm.triton_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runners: list[Any] = []
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", has_triton)
    monkeypatch.setattr(CPUModelRunner, "_postprocess_triton", runners.append)
    runner = SimpleNamespace()
    compat.replace_triton_kernels(runner)
    assert runners == [runner] * replaced


def test_more_ranks_than_devices(simulated_npu: Any) -> None:
    from vllm_fl_ascend.worker import AscendWorker

    worker = object.__new__(AscendWorker)
    worker.local_rank = 1
    with pytest.raises(ConfigError) as caught:
        worker.init_device()
    assert str(caught.value).startswith("rank 1 finds 1 NPUs: lower --tensor-parallel-size, or let ")


def test_no_pool_of_cuda_memory(simulated_npu: Any) -> None:
    from vllm_fl_ascend.worker import AscendWorker

    with object.__new__(AscendWorker)._maybe_get_memory_pool_context("weights"):
        pass


def test_blocks_are_cleared_without_triton(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_fl_ascend import worker

    monkeypatch.setattr(worker, "HAS_TRITON", False)
    layers = {name: SimpleNamespace(kv_cache=torch.ones(5, 2, 4, 6)) for name in ("a", "encoder", "state")}
    attention = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=3, dtype=torch.float32)
    groups = [
        SimpleNamespace(kv_cache_spec=attention, layer_names=["a", "encoder"]),
        SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=["state"]),
    ]
    runner = object.__new__(worker.AscendModelRunner)
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    runner.runner_only_attn_layers = {"encoder"}
    runner._init_kv_zero_meta()
    runner._zero_block_ids([1, 4])
    sums = {name: layer.kv_cache.sum((1, 2, 3)).tolist() for name, layer in layers.items()}
    assert sums == {"a": [48, 0, 48, 48, 0], "encoder": [48] * 5, "state": [48] * 5}
