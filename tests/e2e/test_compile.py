"""torch.compile: reference implementations are traced into the graph, opaque ones are called from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_support import NEW_TOKENS, PROMPTS, Fresh, TinyModel, greedy, make_engine

PLUGIN = """
from vllm_fl.dispatch import BackendImplKind, OpImpl


def silu_and_mul(x):
    import torch

    torch._dynamo.graph_break()  # not to be traced
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def register(registry):
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.test", BackendImplKind.VENDOR, silu_and_mul, vendor="test", opaque=True)
    )
"""


def compiled(model: str) -> dict[str, Any]:
    """In one process: compile, count, try to change the policy, then a second engine from the cache on disk."""
    from vllm_fl.dispatch import set_global_policy
    from vllm_fl.dispatch.policy import SelectionPolicy
    from vllm_fl.errors import FrozenError

    engine = make_engine(model, enforce_eager=False)
    engine.collective_rpc("fl_count_calls")
    config = engine.llm_engine.vllm_config
    result: dict[str, Any] = {
        "tokens": greedy(engine, PROMPTS),
        "counts": engine.collective_rpc("fl_call_counts")[0],
        "mode": config.compilation_config.mode.name,
        "backend": config.compilation_config.backend,
    }
    try:
        set_global_policy(SelectionPolicy(prefer="reference"))
    except FrozenError as error:
        result["frozen"] = str(error)
    return result


def test_compiled_gives_the_same_tokens(fresh: Fresh, tiny_llama: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "fl_test_plugin.py").write_text(PLUGIN)
    outcome = fresh(
        compiled,
        model=str(tiny_llama.path),
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_FL_PLUGIN_MODULES": "fl_test_plugin",
            "VLLM_FL_PREFER": "vendor",
            "PYTHONPATH": str(tmp_path),
        },
    )
    value = outcome.value
    assert (value["mode"], value["backend"]) == ("VLLM_COMPILE", "inductor")
    assert value["tokens"] == tiny_llama.greedy(PROMPTS, NEW_TOKENS)
    steps = value["counts"]["compute_slot_mapping"]["reference.torch"]
    assert value["counts"]["silu_and_mul"] == {"vendor.test": 2 * steps}  # called from the graph
    assert not {"rms_norm", "rotary_embedding"} & set(value["counts"])  # are the graph
    assert value["frozen"] == (
        "set_global_policy: the selection is frozen because vLLM has compiled or captured graphs of the model with"
        " it; change the policy before that, or call thaw() on the manager and compile again"
    )


def over_two_ranks(model: str) -> list[list[int]]:
    return greedy(make_engine(model, enforce_eager=False, tensor_parallel_size=2), PROMPTS)


@pytest.mark.more
def test_compiled_over_two_ranks(fresh: Fresh, tiny_llama: TinyModel) -> None:
    """Collectives are called from the graph, whose memory is planned around them."""
    assert fresh(over_two_ranks, model=str(tiny_llama.path)).value == tiny_llama.greedy(PROMPTS, NEW_TOKENS)
