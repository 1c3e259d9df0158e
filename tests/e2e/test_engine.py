"""vLLM's engine in its forms: in one process, in several, over two ranks. All give transformers' tokens."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_support import NEW_TOKENS, PROMPTS, Fresh, TinyModel, greedy, make_engine


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyModel) -> list[list[int]]:
    return tiny_llama.greedy(PROMPTS, NEW_TOKENS)


def in_this_process(model: str) -> dict[str, Any]:
    """One process, three engines: plain; chunks of 16 tokens; our layers switched off."""
    import torch
    from vllm.platforms import current_platform

    threads = torch.get_num_threads()
    engine = make_engine(model)
    engine.collective_rpc("fl_count_calls")
    result = {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "plain": greedy(engine, PROMPTS),
        "counts": engine.collective_rpc("fl_call_counts")[0],
        "again": greedy(engine, PROMPTS),  # now from the prefix cache
        "penalised": greedy(engine, PROMPTS, repetition_penalty=1e6),
        "penalty_calls": engine.collective_rpc("fl_call_counts")[0].get("apply_repetition_penalties"),
        "selection": engine.collective_rpc("fl_selection")[0],
        "threads_kept": torch.get_num_threads() == threads,
    }
    torch.set_num_threads(1)
    result["threads_settable"] = torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    chunked = make_engine(model, max_num_batched_tokens=16, enable_prefix_caching=False)
    result["chunked"] = greedy(chunked, PROMPTS)
    native = make_engine(model, compilation_config={"custom_ops": ["none"]})
    native.collective_rpc("fl_count_calls")
    result["without_our_layers"] = greedy(native, PROMPTS)
    result["counts_without"] = native.collective_rpc("fl_call_counts")[0]
    return result


def test_in_this_process(fresh: Fresh, tiny_llama: TinyModel, expected: list[list[int]]) -> None:
    outcome = fresh(
        in_this_process,
        model=str(tiny_llama.path),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_FL_PREFER": "reference"},
    )
    value = outcome.value
    assert value["platform"] == "vllm_fl_reference.platform.ReferencePlatform"
    for form in ("plain", "again", "chunked", "without_our_layers"):
        assert value[form] == expected, form
    steps = value["counts"]["compute_slot_mapping"]["reference.torch"]
    layers = 2
    calls = {name: sum(by_impl.values()) for name, by_impl in value["counts"].items()}
    assert calls == {
        "compute_slot_mapping": steps,
        "rms_norm": steps * (2 * layers + 1),
        "rotary_embedding": steps * layers,
        "silu_and_mul": steps * layers,
        "reshape_and_cache": steps * layers,
    }
    assert set(value["counts"]) <= set(value["selection"])
    assert "rms_norm" not in value["counts_without"]
    assert "reshape_and_cache" in value["counts_without"]
    for tokens, prompt in zip(value["penalised"], PROMPTS, strict=True):
        assert len(set(tokens) | set(prompt)) == len(tokens) + len(set(prompt))  # nothing twice
    assert value["penalty_calls"] == {"reference.torch": NEW_TOKENS}
    assert value["threads_kept"]
    assert value["threads_settable"]
    assert "environment variable detected: VLLM_FL" not in outcome.log


def of_processes(model: str, **arguments: Any) -> dict[str, Any]:
    """An engine outside of this process, which has computed something in parallel before, as a user's may."""
    import torch

    torch.set_num_threads(2)
    torch.randn(1000, 1000).exp()
    engine = make_engine(model, **arguments)
    engine.collective_rpc("fl_count_calls")
    return {"tokens": greedy(engine, PROMPTS), "counts": engine.collective_rpc("fl_call_counts")}


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.more)])
def test_in_a_process_of_its_own(method: str, fresh: Fresh, tiny_llama: TinyModel, expected: list[list[int]]) -> None:
    env = {"VLLM_WORKER_MULTIPROC_METHOD": method, "OMP_NUM_THREADS": "2"}
    value = fresh(of_processes, model=str(tiny_llama.path), env=env).value
    assert value["tokens"] == expected
    (counts,) = value["counts"]
    assert counts["rms_norm"]["reference.torch"] == 5 * counts["compute_slot_mapping"]["reference.torch"]


def test_tensor_parallel_over_gloo(fresh: Fresh, tiny_llama: TinyModel, expected: list[list[int]]) -> None:
    value = fresh(of_processes, model=str(tiny_llama.path), tensor_parallel_size=2).value
    assert value["tokens"] == expected
    assert len(value["counts"]) == 2
    assert value["counts"][0] == value["counts"][1]
