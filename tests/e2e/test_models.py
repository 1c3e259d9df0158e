"""Greedy tokens of tiny models in vLLM, through dispatch, equal those of transformers in float32.

A process serves a few models: for each it makes the checkpoint, asks transformers, then runs one engine a setting.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from token_comparison import LEAST_MARGIN, LENGTHS, ask, draw_prompts, engine  # noqa: E402

#: Models by process; two processes run at a time.
PROCESSES = (("qwen3_next", "gemma2", "gpt_oss"), ("llama", "qwen3", "qwen3_moe", "deepseek_v3"))
MODELS = [name for names in PROCESSES for name in names]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
    "chunked": {"enable_prefix_caching": False, "enable_chunked_prefill": True, "max_num_batched_tokens": 24},
    "cached": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 1024},
    "cached chunked": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 72},
}
#: What each engine is asked: all prompts, and then once more, at once (eight run together) and one after another.
ROUNDS = ("together", "together again", "alone")
#: Operators that the model cannot run without.
OPERATORS = {
    "llama": {"reshape_and_cache", "rms_norm", "rotary_embedding", "silu_and_mul"},
    "qwen3": {"reshape_and_cache", "rms_norm", "rotary_embedding", "silu_and_mul"},
    "qwen3_moe": {"fused_experts", "reshape_and_cache", "rms_norm", "topk_softmax"},
    "qwen3_next": {
        *("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_experts"),
        *("fused_gdn_gating", "fused_recurrent_gated_delta_rule", "gemma_rms_norm", "reshape_and_cache"),
        *("rms_norm_gated", "silu_and_mul", "topk_softmax"),
    },
    "gemma2": {"gelu_and_mul", "gemma_rms_norm", "reshape_and_cache", "rotary_embedding"},
    "gpt_oss": {"fused_experts", "reshape_and_cache", "rms_norm", "topk_softmax"},
    "deepseek_v3": {"concat_and_cache_mla", "fused_experts", "grouped_topk", "mla_attention", "rms_norm"},
}


def run_models(names: list[str], folder: str) -> dict[str, Any]:
    """Everything about some models; called in a process of its own."""
    return {name: run_model(name, str(Path(folder) / name)) for name in names}


def run_model(name: str, path: str) -> dict[str, Any]:
    import tiny_models

    from vllm_fl.dispatch import get_default_manager

    drawn = draw_prompts(tiny_models.make(name, Path(path)))
    prompts = [prompt for prompt, _, _ in drawn]
    manager = get_default_manager()
    manager.count_calls(True)
    outputs: dict[str, Any] = {}
    for setting, arguments in SETTINGS.items():
        with engine(path, arguments) as llm:
            outputs[setting] = {label: ask(llm, prompts, label != "alone") for label in ROUNDS}
    return {
        "lengths": [len(prompt) for prompt in prompts],
        "expected": [tokens for _, tokens, _ in drawn],
        "margin": min(margin for _, _, margin in drawn),
        "outputs": outputs,
        "operators": sorted({operator for operator, _ in manager.call_counts()}),
    }


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, fresh: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`results(name)`: what run_model found. The processes of all models that are asked for start at once."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",  # more do not pay for matrices of this size
    }
    asked = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
    }
    with ThreadPoolExecutor(2) as pool:
        running = {}
        for process in PROCESSES:
            names = [name for name in process if name in asked]
            if names:
                folder = str(tmp_path_factory.mktemp("checkpoints"))
                future = pool.submit(fresh, run_models, env=env, timeout=840, names=names, folder=folder)
                running.update(dict.fromkeys(names, future))
        yield lambda name: running[name].result().value[name]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(results: Any, name: str, setting: str) -> None:
    result = results(name)
    assert result["margin"] > LEAST_MARGIN
    for label in ROUNDS:
        tokens, _ = result["outputs"][setting][label]
        wrong = [
            (length, ours, theirs)
            for length, ours, theirs in zip(result["lengths"], tokens, result["expected"], strict=True)
            if ours != theirs
        ]
        assert wrong == [], label


@pytest.mark.parametrize("name", MODELS)
def test_repeated_prompts_come_from_the_prefix_cache(results: Any, name: str) -> None:
    result = results(name)
    for setting in ("whole", "chunked"):
        assert all(not any(cached) for _, cached in result["outputs"][setting].values())
    for setting in ("cached", "cached chunked"):
        longest = result["lengths"].index(300)
        for label in ("together again", "alone"):
            _, cached = result["outputs"][setting][label]
            assert cached[longest] >= 256, (setting, label)
            assert all(hit < length for hit, length in zip(cached, result["lengths"], strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_operators_are_reached(results: Any, name: str) -> None:
    assert set(results(name)["operators"]) >= OPERATORS[name]


def run_two_ranks(name: str, folder: str) -> dict[str, Any]:
    """Tensor and expert parallel over two processes."""
    import tiny_models

    drawn = draw_prompts(tiny_models.make(name, Path(folder)))
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engine(folder, {**SETTINGS["cached chunked"], **parallel}) as llm:
        tokens, _ = ask(llm, [prompt for prompt, _, _ in drawn], together=True)
    return {"tokens": tokens, "expected": [tokens for _, tokens, _ in drawn]}


def test_two_ranks_share_heads_and_experts(fresh: Any, tmp_path: Path) -> None:
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    value = fresh(run_two_ranks, env=env, timeout=600, name="qwen3_next", folder=str(tmp_path)).value
    assert value["tokens"] == value["expected"]


def run_encoders(folder: str) -> dict[str, list[float]]:
    """For each encoder, how far the embedding of each prompt is from the first token's state in transformers."""
    import tiny_models
    import torch
    from e2e_support import save_byte_tokenizer
    from vllm import LLM

    found: dict[str, list[float]] = {}
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, tiny_models.VOCABULARY, (length,), generator=random).tolist() for length in LENGTHS]
    for name in tiny_models.ENCODERS:
        path = Path(folder) / name
        model = tiny_models.make(name, path)
        save_byte_tokenizer(path)
        llm = LLM(str(path), runner="pooling", dtype="float32", max_model_len=400, max_num_seqs=8, enforce_eager=True)
        answers = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        found[name] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.no_grad():
                state = model(torch.tensor([prompt])).last_hidden_state[0, 0]
            ours = torch.tensor(answer.outputs.embedding)
            found[name].append(float((ours - state / state.norm()).abs().max()))
    return found


def run_float8(folder: str) -> dict[str, Any]:
    """Each scheme's tokens, those of transformers, and how often the operators were called; in a process of its own."""
    import float8
    import tiny_models

    from vllm_fl.dispatch import get_default_manager

    found = {}
    for scheme in float8.SCHEMES:
        path = Path(folder) / scheme
        model = tiny_models.make("llama", path)
        float8.quantise(path, model, scheme)
        drawn = draw_prompts(model, (1, 17, 64))
        get_default_manager().count_calls(True)
        with engine(str(path), {}) as llm:
            answers = [ask(llm, [prompt for prompt, _, _ in drawn], together)[0] for together in (True, False)]
        calls = {operator for operator, _ in get_default_manager().call_counts()}
        found[scheme] = {"answers": answers, "expected": [tokens for _, tokens, _ in drawn], "calls": sorted(calls)}
    return found


def test_linear_layers_of_float8(fresh: Any, tmp_path: Path) -> None:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    found = fresh(run_float8, env=env, timeout=600, folder=str(tmp_path)).value
    for scheme, operators in (("channels", {"scaled_mm"}), ("blocks", {"scaled_mm", "per_token_group_quant_fp8"})):
        of_scheme = found[scheme]
        assert of_scheme["answers"] == [of_scheme["expected"]] * 2, scheme
        assert operators <= set(of_scheme["calls"])


@pytest.mark.more
def test_encoders_give_the_embeddings_of_transformers(fresh: Any, tmp_path: Path) -> None:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    found = fresh(run_encoders, env=env, timeout=600, folder=str(tmp_path)).value
    assert set(found) == {"bert", "modernbert"}
    for name, distances in found.items():
        assert max(distances) < 1e-5, name
