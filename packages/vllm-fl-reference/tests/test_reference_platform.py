"""The CPU platform: what it tells vLLM of the machine, and what it settles in vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="the platform is a class of vLLM's")
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

from vllm_fl.errors import ConfigError
from vllm_fl_reference import platform
from vllm_fl_reference.platform import ReferencePlatform
from vllm_fl_reference.worker import THREADS_KEY, ReferenceWorker, _is_automatic, _memory_unchecked

GIB = 1 << 30


def test_it_is_an_out_of_tree_platform_on_the_cpu() -> None:
    assert isinstance(current_platform, ReferencePlatform)
    assert current_platform.is_out_of_tree()
    assert not current_platform.is_cpu()
    assert not current_platform.is_cuda_alike()
    assert torch.device(f"{current_platform.device_name}:0").type == current_platform.device_type == "cpu"
    assert current_platform.supported_dtypes == [torch.bfloat16, torch.float16, torch.float32]
    assert current_platform.get_device_capability() is None


def test_memory_of_the_machine() -> None:
    total = psutil.virtual_memory().total
    assert 0 < current_platform.free_memory() <= total
    assert 0 < current_platform.get_device_total_memory() <= total
    assert 0 < current_platform.get_current_memory_usage() <= total


V2 = {"memory.max": "4000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 500\n"}
V1 = {
    "memory/memory.limit_in_bytes": "4000",
    "memory/memory.usage_in_bytes": "3900",
    "memory/memory.stat": "total_inactive_file 50\n",
}


@pytest.mark.parametrize(
    ("files", "headroom"),
    [
        pytest.param(V2, 1500, id="v2"),
        pytest.param({**V2, "memory.max": "max"}, None, id="v2-unlimited"),
        pytest.param({**V2, "memory.current": "9000"}, 0, id="v2-above"),
        pytest.param(V1, 150, id="v1"),
        pytest.param({}, None, id="none"),
    ],
)
def test_headroom_of_a_container(
    files: dict[str, str], headroom: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(platform, "_CGROUP", tmp_path)
    assert platform._container_headroom() == headroom
    if headroom is not None:
        assert ReferencePlatform.free_memory() == headroom


@pytest.mark.parametrize(("text", "expected"), [("2", 2 * GIB), (" 1 ", GIB), ("0", None), ("", None)])
def test_kv_cache_space_in_gib(text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
    assert VllmConfig().cache_config.kv_cache_memory_bytes == expected


def test_bytes_of_the_kv_cache_win_over_the_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert VllmConfig(cache_config={"kv_cache_memory_bytes": 5}).cache_config.kv_cache_memory_bytes == 5


def test_a_space_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2G")
    with pytest.raises(ConfigError) as caught:
        platform._settle_cache(SimpleNamespace(kv_cache_memory_bytes=None))
    assert str(caught.value) == "environment variable VLLM_CPU_KVCACHE_SPACE: '2G' is not a whole number of GiB"


def test_without_a_compiler_the_model_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert VllmConfig().compilation_config.mode == CompilationMode.NONE
    assert warnings == [
        "no C++ compiler (g++, clang++, or what CXX names): the model runs without torch.compile, and slower; "
        "remedy: install g++ (apt-get install g++)"
    ]
    asked = VllmConfig(compilation_config={"mode": 3})
    assert asked.compilation_config.mode == CompilationMode.VLLM_COMPILE


def test_a_compiler_that_cxx_names_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "my-c++ -march=native")
    assert VllmConfig().compilation_config.mode == CompilationMode.VLLM_COMPILE


def test_overlapped_batches_are_refused(warnings: list[str]) -> None:
    config = SimpleNamespace(
        model_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(enable_dbo=True),
    )
    platform._settle_scheduling(config)
    assert config.scheduler_config.async_scheduling is config.parallel_config.enable_dbo is False
    assert warnings == ["--enable-dbo: there is no second stream to overlap with on a CPU; it is switched off"]


@pytest.mark.parametrize(
    ("fields", "automatic"),
    [({}, True), ({"kv_cache_memory_bytes": 7}, False), ({"gpu_memory_utilization": 0.5}, False)],
    ids=["nothing", "bytes", "share"],
)
def test_the_size_of_the_cache_is_ours_if_nobody_gives_one(fields: dict[str, Any], automatic: bool) -> None:
    config = VllmConfig(cache_config=fields).cache_config
    before = config.kv_cache_memory_bytes
    assert _is_automatic(config) is automatic
    with _memory_unchecked(config):
        assert config.kv_cache_memory_bytes == (0 if automatic else before)
    assert config.kv_cache_memory_bytes == before


class Spec:
    def __init__(self, size: int) -> None:
        self.page_size_bytes = size // 10
        self.sequence = size - self.page_size_bytes

    def max_memory_usage_bytes(self, config: Any) -> int:
        return self.sequence


@pytest.mark.parametrize(
    ("free", "workers", "sequence", "size"),
    [
        pytest.param(100 * GIB, 1, GIB, 4 * GIB, id="the-usual"),
        pytest.param(100 * GIB, 1, 10 * GIB, 10 * GIB, id="one-sequence-at-least"),
        pytest.param(6 * GIB, 1, GIB, 3 * GIB, id="half-of-what-is-free"),
        pytest.param(6 * GIB, 2, GIB, 3 * GIB // 2, id="half-for-two-workers"),
        pytest.param(6 * GIB, 1, 10 * GIB, 3 * GIB, id="never-more-than-half"),
        pytest.param(100 * GIB, 1, 1000, 2 * 4 * 1000, id="no-more-than-useful"),
    ],
)
def test_default_size_of_the_cache(
    free: int, workers: int, sequence: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = object.__new__(ReferenceWorker)
    warmed: list[bool] = []
    worker.cache_config = VllmConfig().cache_config
    worker.vllm_config = None
    worker.parallel_config = SimpleNamespace(local_world_size=workers)
    worker.scheduler_config = SimpleNamespace(max_num_seqs=4)
    worker.model_runner = SimpleNamespace(warming_up_model=lambda: warmed.append(True))
    layers = {str(i): Spec(sequence // 2) for i in range(2)}
    monkeypatch.setattr(ReferenceWorker, "get_kv_cache_spec", lambda self: layers)
    monkeypatch.setattr(ReferencePlatform, "free_memory", classmethod(lambda cls: free))
    assert worker.determine_available_memory() == size
    assert warmed == [True]


def test_the_number_of_threads_is_in_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(self: Any) -> None:
        seen.append(self.vllm_config.additional_config[THREADS_KEY])

    seen: list[int] = []
    monkeypatch.setattr("vllm_fl.integration.worker.FLWorkerMixin.load_model", load_model)
    worker = object.__new__(ReferenceWorker)
    worker.vllm_config = VllmConfig()
    worker.model_runner = SimpleNamespace(get_model=torch.nn.Module)
    worker.load_model()
    before = worker.vllm_config.compute_hash()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    worker.load_model()
    assert seen[1] == 77 != seen[0]
    assert worker.vllm_config.compute_hash() != before
