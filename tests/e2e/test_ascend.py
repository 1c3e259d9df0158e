"""The Ascend platform on a simulated torch_npu: chosen by its probe, tokens as on the reference platform.

One process on each platform serves all models. Both compute in float16, which the NPU's attention asks for;
prompts are such that the likeliest token leads by more than its rounding.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e_support import NEW_TOKENS, Fresh, greedy, make_engine

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
SIMULATION = ROOT / "packages/vllm-fl-ascend/tests/simulated_torch_npu"
sys.path.insert(0, str(ROOT / "tests/models"))

#: Model -> what is changed in it. Head sizes are of several kinds, all of which the NPU's attention takes.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {},
    "qwen3_next": {},
    # torch_npu chooses among groups of three experts and more.
    "deepseek_v3": {"n_routed_experts": 16},
}
#: Around a block of the NPU's cache, and over several chunks of a prefill.
LENGTHS = (1, 9, 127, 128, 150)
CHUNK = 64
LEAST_MARGIN = 0.04
COMMON = {"reshape_and_cache", "rms_norm", "rotary_embedding"}
OPERATORS = {
    "llama": {*COMMON, "silu_and_mul"},
    "qwen3": {*COMMON, "silu_and_mul"},
    "qwen3_moe": {*COMMON, "fused_experts", "topk_softmax"},
    "qwen3_next": {
        *("fused_experts", "gemma_rms_norm", "reshape_and_cache", "rotary_embedding", "silu_and_mul", "topk_softmax")
    },
    "deepseek_v3": {*COMMON, "silu_and_mul", "fused_experts", "grouped_topk"},
}


def serve(folder: str, prompts: dict[str, list[list[int]]], device_folder: str | None = None) -> dict[str, Any]:
    """Tokens, and who served the operators, by model; the platform, and why it was chosen."""
    if device_folder is not None:
        import torch_npu

        from vllm_fl_ascend import plugin

        torch_npu.take_npu_for_cpu()
        plugin.DEVICE_FOLDER = Path(device_folder)
    from vllm import ModelRegistry
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.plugins import resolve_platform

    found: dict[str, Any] = {"platform": type(current_platform).__name__, "reason": resolve_platform().reason}
    manager = get_default_manager()
    for name in MODELS:
        model = Path(folder) / name
        # Of a class that is imported here vLLM need not ask a process of its own, which takes ten seconds.
        architecture = json.loads((model / "config.json").read_text())["architectures"][0]
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
        manager.count_calls(True)
        engine = make_engine(
            str(model),
            dtype="float16",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=32 << 20,
            max_num_batched_tokens=CHUNK,
        )
        tokens = greedy(engine, prompts[name], detokenize=False)
        worker = engine.llm_engine.model_executor.driver_worker.worker
        runner = worker.model_runner
        found[name] = {
            "tokens": tokens,
            "made of": [type(worker).__name__, type(runner).__name__, str(worker.device)],
            "attention": [group.backend.__name__ for groups in runner.attn_groups for group in groups],
            "served by": dict(manager.call_counts().keys()),
        }
        del engine, worker, runner
        gc.collect()
        cleanup_dist_env_and_memory()
    return found


def _make_models(folder: Path) -> tuple[dict[str, list[list[int]]], dict[str, list[list[int]]]]:
    """Checkpoints; the prompts of each, and how transformers continues them in float32."""
    import tiny_models
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prompts: dict[str, list[list[int]]] = {}
    expected: dict[str, list[list[int]]] = {}
    for name, changes in MODELS.items():
        model = tiny_models.make(name, folder / name, **changes)
        random = torch.Generator().manual_seed(3)
        prompts[name], expected[name] = [], []
        for length in LENGTHS:
            answer = None
            while answer is None or answer.margin < LEAST_MARGIN:
                prompt = torch.randint(1, tiny_models.VOCABULARY, (length,), generator=random).tolist()
                answer = tiny_models.greedy(model, prompt, NEW_TOKENS)
            prompts[name].append(prompt)
            expected[name].append(answer.tokens)
    torch.set_num_threads(threads)
    return prompts, expected


@pytest.fixture(scope="module")
def served(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `serve` found on "npu" and on "reference", and what is "expected"."""
    folder, devices = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("dev")
    (devices / "davinci0").touch()
    prompts, expected = _make_models(folder)
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(SIMULATION), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = {"folder": str(folder), "prompts": prompts}
    with ThreadPoolExecutor(2) as pool:
        npu = pool.submit(fresh, serve, env={**common, "PYTHONPATH": path}, **arguments, device_folder=str(devices))
        reference = pool.submit(fresh, serve, env={**common, "VLLM_FL_PLATFORM": "reference"}, **arguments)
        return {"npu": npu.result().value, "reference": reference.result().value, "expected": expected}


def test_platform_is_chosen_by_its_probe(served: dict[str, Any]) -> None:
    assert (served["npu"]["platform"], served["npu"]["reason"]) == ("AscendPlatform", "its probe succeeds")
    assert served["reference"]["platform"] == "ReferencePlatform"


@pytest.mark.parametrize("name", MODELS)
def test_tokens(served: dict[str, Any], name: str) -> None:
    assert served["npu"][name]["tokens"] == served["reference"][name]["tokens"] == served["expected"][name]


@pytest.mark.parametrize("name", MODELS)
def test_served_by_torch_npu(served: dict[str, Any], name: str) -> None:
    found = served["npu"][name]
    assert found["made of"] == ["AscendWorker", "AscendModelRunner", "npu:0"]
    assert "AscendAttentionBackend" in found["attention"]
    served_by = found["served by"]
    # vLLM asks for an attention backend once for all layers of one kind, whichever model they are of.
    by_us = {operator for operator, implementation in served_by.items() if implementation == "vendor.ascend"}
    # The sampler's operator is called when the engine warms up.
    assert by_us - {"attention_backend"} == {*OPERATORS[name], "apply_top_k_top_p"}
    assert {*served_by.values()} == {"vendor.ascend", "reference.torch"}
