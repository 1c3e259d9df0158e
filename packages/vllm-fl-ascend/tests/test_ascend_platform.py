"""The platform: what vLLM asks it, and what it says to a configuration that it cannot serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fl.errors import ConfigError

vllm_config = pytest.importorskip("vllm.config")


@pytest.fixture
def platform(simulated_npu: Any) -> Any:
    from vllm_fl_ascend.platform import AscendPlatform

    return AscendPlatform


def make_config(**changes: Any) -> Any:
    """What the platform reads of vLLM's configuration, as vLLM passes it without options."""
    flags = SimpleNamespace(fuse_norm_quant=False)
    parts = {
        "compilation": {"mode": None, "cudagraph_mode": None, "custom_ops": [], "pass_config": flags},
        "parallel": {"world_size": 1, "data_parallel_size": 1, "worker_cls": "auto"},
        "cache": {"block_size": 16, "user_specified_block_size": False},
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        parts[part][key] = value
    spaces = {f"{name}_config": SimpleNamespace(**values) for name, values in parts.items()}
    return SimpleNamespace(**spaces, model_config=None, lora_config=None, additional_config={})


def test_what_it_is(platform: Any) -> None:
    assert (platform.device_type, platform.device_name, platform.dispatch_key) == ("npu", "npu", "PrivateUse1")
    assert (platform.dist_backend, platform.device_control_env_var) == ("hccl", "ASCEND_RT_VISIBLE_DEVICES")
    present = platform()
    assert present.is_out_of_tree()
    assert not present.is_cuda_alike()
    assert present.supported_dtypes[:2] == [torch.bfloat16, torch.float16]


def test_device(platform: Any) -> None:
    assert platform.get_device_name() == "simulated NPU"
    assert platform.get_device_total_memory() == 64 << 30
    assert platform.get_current_memory_usage() == 0.0
    assert platform.num_compute_units() == 20
    assert platform.manual_seed_all(3) is None
    assert platform().device_count() == 1  # vLLM asks torch.npu by way of the platform
    with pytest.raises(RuntimeError, match="there is one device"):
        platform.set_device(1)


def test_visible_devices(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    assert platform.device_id_to_physical_device_id(1) == 6


def test_defaults_are_eager(platform: Any) -> None:
    config = make_config()
    platform.apply_config_platform_defaults(config)
    assert config.compilation_config.mode == vllm_config.CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == vllm_config.CUDAGraphMode.NONE
    assert config.compilation_config.custom_ops == ["all"]
    platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "vllm_fl_ascend.worker.AscendWorker"
    assert config.additional_config["vllm_fl_dispatch_fingerprint"]


def test_graphs_by_pieces_where_compilation_is_asked_for(platform: Any) -> None:
    config = make_config(compilation__mode=vllm_config.CompilationMode.VLLM_COMPILE)
    platform.apply_config_platform_defaults(config)
    assert config.compilation_config.cudagraph_mode == vllm_config.CUDAGraphMode.PIECEWISE
    platform.check_and_update_config(config)
    assert platform.get_compile_backend() == "eager"
    assert platform.get_static_graph_wrapper_cls() == "vllm.compilation.cuda_graph.CUDAGraphWrapper"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compilation__cudagraph_mode": vllm_config.CUDAGraphMode.FULL},
            'cudagraph_mode FULL: the Ascend platform has "NONE" and "PIECEWISE"; its attention takes a step\'s lengths'
            " from the host, which a graph of the whole step would keep for ever",
        ),
        (
            {"compilation__cudagraph_mode": vllm_config.CUDAGraphMode.PIECEWISE, "parallel__world_size": 2},
            "cudagraph_mode PIECEWISE: graphs on several NPUs need a communicator that can be captured; there is none:"
            ' set it to "NONE", or use one NPU',
        ),
        (
            {"parallel__data_parallel_size": 2},
            "--data-parallel-size 2: the Ascend platform does not have it yet; start one server for each group of NPUs,"
            " with ASCEND_RT_VISIBLE_DEVICES",
        ),
        (
            {"cache__block_size": 64, "cache__user_specified_block_size": True},
            "--block-size 64: torch_npu's attention takes multiples of 128; leave it out for 128",
        ),
    ],
    ids=["full graphs", "graphs on several", "data parallel", "block size"],
)
def test_configuration_refused(platform: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        platform.check_and_update_config(make_config(**changes))
    assert str(caught.value) == message


@pytest.mark.parametrize("block_size", [128, 384])
def test_block_sizes(platform: Any, block_size: int) -> None:
    platform.check_and_update_config(make_config(cache__block_size=block_size, cache__user_specified_block_size=True))


def test_environment(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"VLLM_MLA_DISABLE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    for name in values:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    platform.pre_register_and_update()
    import os

    assert {name: os.environ[name] for name in values} == values


def test_attention_block_size(simulated_npu: Any) -> None:
    from vllm_fl_ascend.attention import AscendAttentionBackend

    assert AscendAttentionBackend.get_preferred_block_size(16) == 128
    assert AscendAttentionBackend.get_supported_kernel_block_sizes() == [128]
    shape = AscendAttentionBackend.get_kv_cache_shape(7, 128, 2, 64)
    order = AscendAttentionBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert (shape, order[0]) == ((7, 2, 128, 128), 1)
    assert AscendAttentionBackend.indexes_kv_by_block_stride()


def test_builder_refuses_float32(simulated_npu: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_fl_ascend.attention import AscendAttentionMetadataBuilder

    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
    with pytest.raises(NotImplementedError) as caught:
        AscendAttentionMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))
    assert str(caught.value) == (
        "the Ascend attention computes in float16 and bfloat16, not in torch.float32: set --dtype; "
        'VLLM_FL_PER_OP="attention_backend=reference" takes the slower attention in PyTorch'
    )


def _common(**changes: Any) -> Any:
    values = {
        "num_reqs": 2,
        "causal": True,
        "query_start_loc_cpu": torch.tensor([0, 1, 4, 4]),
        "seq_lens": torch.tensor([9, 30, 0]),
        "block_table_tensor": torch.zeros(3, 4, dtype=torch.int32),
        "slot_mapping": torch.tensor([8, 27, 28, 29, -1, -1]),
        **changes,
    }
    return SimpleNamespace(**values)


def _builder() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_fl_ascend.attention import AscendAttentionMetadataBuilder

    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float16)
    return AscendAttentionMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("causal", "expected"),
    [(True, True), (False, False), (torch.tensor([True, True, False]), True), (torch.tensor([False, False]), False)],
    ids=["causal", "full", "each causal", "each full"],
)
def test_metadata(simulated_npu: Any, causal: Any, expected: bool) -> None:
    step = _builder().build(0, _common(causal=causal)).step
    assert (step.query_ends, step.seq_lens, step.causal) == ([1, 4], [9, 30], expected)
    assert step.slots.tolist() == [8, 27, 28, 29]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"causal": torch.tensor([True, False])}, "one mask for all requests"),
        ({"mm_req_doc_ranges": {0: [(1, 3)]}}, "prefix LM"),
        ({"rswa_prefix_lens": torch.tensor([1, 2])}, "reference sliding window"),
    ],
    ids=["mixed", "prefix LM", "R-SWA"],
)
def test_masks_refused(simulated_npu: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        _builder().build(0, _common(**changes))
