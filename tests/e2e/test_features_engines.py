"""Features on the CPU platform that need an engine of their own, each against transformers.

One process holds the engines, one after another. The marks are those of test_features.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_support import NEW_TOKENS, PROMPTS, Fresh, TinyModel, ask, make_engine, run_group, tokens_of
from safetensors.torch import save_file
from server_support import CLI

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny_models
from token_comparison import spare_inspection

pytestmark = pytest.mark.more

ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
CHUNK = 16
DRAFTED_TOKENS = 48
RANK, ALPHA = 4, 8
ADAPTERS = ("first", "second", "third")
#: Who asks for which adapter, all at once; None: for the model itself.
ASKED = (None, "first", "second", "first", None, "third", "second")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def run(model: str, turning: str, experts: str, adapters: dict[str, str]) -> dict[str, Any]:
    """Everything that is asked; called in a process of its own."""
    return {
        "chunked": chunked(model),
        "asleep": asleep(model),
        "pooled": pooled(model),
        "drafted": drafted(turning),
        "adapted": adapted(model, adapters),
        "refused": refused(model, experts),
    }


def chunked(model: str) -> dict[str, Any]:
    engine = make_engine(model, max_num_batched_tokens=CHUNK, enable_prefix_caching=False)
    engine.collective_rpc("fl_count_calls")
    tokens = tokens_of(ask(engine, PROMPTS))
    counts = engine.collective_rpc("fl_call_counts")[0]
    return {"tokens": tokens, "steps": counts["compute_slot_mapping"]["reference.torch"]}


def asleep(model: str) -> dict[str, Any]:
    """Pause, and sleep of both levels, with the same prompt before and after."""
    engine = make_engine(model, enable_sleep_mode=True)
    sleeping = engine.llm_engine.is_sleeping
    found: dict[str, Any] = {"states": [sleeping()], "answers": [], "written": []}
    for level in (0, 1, 2):
        (answer,) = ask(engine, [PROMPTS[3]])
        found["answers"].append([tokens_of([answer])[0], answer.num_cached_tokens])
        engine.sleep(level=level)
        found["states"].append(sleeping())
        found["written"].append(engine.collective_rpc(written)[0])
        engine.wake_up(["scheduling"] if level == 0 else None)
        found["states"].append(sleeping())
    (answer,) = ask(engine, [PROMPTS[3]])
    found["answers"].append([tokens_of([answer])[0], answer.num_cached_tokens])
    return found


def written(worker: Any) -> bool:
    """Whether the whole pages of any layer's KV cache hold anything."""
    return any(bool(cache.flatten()[1024:-1024].any()) for cache in worker.model_runner.kv_caches)


def drafted(model: str) -> dict[str, Any]:
    """Greedy, with a limit that leaves one token, and with one that leaves three."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = make_engine(model, speculative_config=config, disable_log_stats=False)
    samplings = {"greedy": {}, "one": {"temperature": 0.8, "top_k": 1}, "three": {"temperature": 0.8, "top_k": 3}}
    tokens = {
        name: tokens_of(ask(engine, PROMPTS, max_tokens=DRAFTED_TOKENS, seed=5, **sampling))
        for name, sampling in samplings.items()
    }
    counters = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    prefix = "vllm:spec_decode_num_"
    return {
        "tokens": tokens,
        "accepted": counters[f"{prefix}accepted_tokens"],
        "proposed": counters[f"{prefix}draft_tokens"],
    }


def pooled(model: str) -> list[list[float]]:
    engine = make_engine(model, runner="pooling")
    answers = engine.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    return [answer.outputs.embedding for answer in answers]


def adapted(model: str, adapters: dict[str, str]) -> dict[str, Any]:
    """All at once, with room for two adapters of three; then one after another."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = make_engine(model, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=3)
    requests = {name: LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters.items(), 1)}
    parameters = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPTS[1]} for _ in ASKED]
    wanted = [requests.get(name) for name in ASKED]
    together = engine.generate(prompts, parameters, lora_request=wanted, use_tqdm=False)
    alone = [engine.generate(prompts[0], parameters, lora_request=request, use_tqdm=False)[0] for request in wanted]
    return {"together": tokens_of(together), "alone": tokens_of(alone), "model": tokens_of(ask(engine, PROMPTS))}


def refused(model: str, experts: str) -> dict[str, str]:
    """What is said when an engine does not start."""
    by_model = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "adapters": (experts, {"enable_lora": True, "skip_tokenizer_init": True}),
        "drafts": (model, {"speculative_config": by_model}),
    }
    said = {}
    for name, (path, arguments) in asked.items():
        spare_inspection(path)
        with pytest.raises(ValueError) as caught:
            make_engine(path, **arguments)
        said[name] = str(caught.value)
    return said


def write_adapter(path: Path, model: TinyModel, seed: int) -> dict[str, torch.Tensor]:
    """An adapter as PEFT writes it; returns what it adds to the weight of each module."""
    random = torch.Generator().manual_seed(seed)
    saved, added = {}, {}
    for name, module in model.linear_modules():
        if name.rpartition(".")[2] in TARGETS:
            a = torch.randn(RANK, module.in_features, generator=random) * 0.3
            b = torch.randn(module.out_features, RANK, generator=random) * 0.3
            saved[f"base_model.model.{name}.lora_A.weight"], saved[f"base_model.model.{name}.lora_B.weight"] = a, b
            added[name] = ALPHA / RANK * b @ a
    path.mkdir()
    save_file(saved, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
              "bias": "none", "target_modules": list(TARGETS)}  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.fixture(scope="module")
def adapters(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, TinyModel]]:
    """Path of each adapter, and the model that has it in its weights."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: (folder / name, tiny_llama.with_added(write_adapter(folder / name, tiny_llama, seed)))
        for seed, name in enumerate(ADAPTERS)
    }


@pytest.fixture(scope="module")
def turning_llama(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model that mostly goes round among twelve tokens, which n-grams foresee, and sometimes leaves them."""
    embeddings = tiny_llama.embeddings
    weights = {"model.embed_tokens": 20 * embeddings, "lm_head": 2 * embeddings.roll(288 // 12, 0)}
    return tiny_llama.with_added(weights, tmp_path_factory.mktemp("turning-llama"))


@pytest.fixture(scope="module")
def found(
    fresh: Fresh,
    tiny_llama: TinyModel,
    turning_llama: TinyModel,
    adapters: dict[str, tuple[Path, TinyModel]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    paths = {name: str(path) for name, (path, _) in adapters.items()}
    experts = tmp_path_factory.mktemp("experts")
    tiny_models.make("qwen3_moe", experts)
    models = {"model": str(tiny_llama.path), "turning": str(turning_llama.path), "experts": str(experts)}
    return fresh(run, **models, adapters=paths, env=ENV).value


@pytest.mark.feature("Chunked prefill")
def test_chunked_prefill(found: Any, tiny_llama: TinyModel) -> None:
    """Prompts of up to 150 tokens in pieces of 16: transformers' tokens, and as many steps as that takes."""
    assert found["chunked"]["tokens"] == tiny_llama.greedy(PROMPTS, NEW_TOKENS)
    assert found["chunked"]["steps"] >= sum(map(len, PROMPTS)) // CHUNK + NEW_TOKENS - 1


@pytest.mark.feature("Pause, sleep, wake up")
def test_pause_and_sleep(found: Any, tiny_llama: TinyModel) -> None:
    """A pause keeps the KV cache, sleep gives its memory back; afterwards transformers' tokens again."""
    asleep = found["asleep"]
    assert asleep["states"] == [False] + [True, False] * 3
    assert asleep["written"] == [True, False, False]
    (expected,) = tiny_llama.greedy([PROMPTS[3]], NEW_TOKENS)
    assert asleep["answers"] == [[expected, 0], [expected, 144], [expected, 0], [expected, 0]]


@pytest.mark.feature("Speculative decoding (n-grams)")
def test_drafts_do_not_change_the_answer(found: Any, turning_llama: TinyModel) -> None:
    """Drafts are accepted and refused; greedy tokens are transformers', and so are those of sampling with top-k 1."""
    drafted = found["drafted"]
    assert 60 < drafted["accepted"] < drafted["proposed"] - 60
    expected = turning_llama.greedy(PROMPTS, DRAFTED_TOKENS)
    assert drafted["tokens"]["greedy"] == expected
    assert drafted["tokens"]["one"] == expected


@pytest.mark.feature("Speculative decoding (n-grams)")
def test_drafts_are_accepted_within_the_limits(found: Any, turning_llama: TinyModel) -> None:
    """Sampled with top-k 3, every token is one of the three likeliest for transformers."""
    sampled = found["drafted"]["tokens"]["three"]
    assert sampled != found["drafted"]["tokens"]["greedy"]
    for prompt, tokens in zip(PROMPTS, sampled, strict=True):
        likeliest = turning_llama.logits([*prompt, *tokens])[len(prompt) - 1 : -1].topk(3).indices
        assert bool((likeliest == torch.tensor(tokens).unsqueeze(1)).any(1).all())


@pytest.mark.feature("Pooling")
def test_pooling(found: Any, tiny_llama: TinyModel) -> None:
    """Embeddings from a decoder: the last token's last state in transformers, normalised, within 1e-5."""
    for prompt, embedding in zip(PROMPTS, found["pooled"], strict=True):
        state = tiny_llama.state(prompt)
        torch.testing.assert_close(torch.tensor(embedding), state / state.norm(), atol=1e-5, rtol=0)


@pytest.mark.feature("LoRA, several adapters in one batch")
def test_adapters(found: Any, tiny_llama: TinyModel, adapters: dict[str, tuple[Path, TinyModel]]) -> None:
    """Three adapters with room for two, and requests without one: transformers' tokens with the weights merged."""
    models = {None: tiny_llama, **{name: merged for name, (_, merged) in adapters.items()}}
    expected = [models[name].greedy([PROMPTS[1]], NEW_TOKENS)[0] for name in ASKED]
    assert len({tuple(tokens) for tokens in expected}) == 1 + len(ADAPTERS)
    assert found["adapted"]["together"] == expected
    assert found["adapted"]["alone"] == expected
    assert found["adapted"]["model"] == tiny_llama.greedy(PROMPTS, NEW_TOKENS)


@pytest.mark.feature("LoRA for experts, drafting by a model: refused")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("adapters", "--enable-lora: the CPU reference platform has no adapters for mixtures of experts; merge"),
        ("drafts", "--speculative-config: drafting by method 'draft_model' needs kernels that the CPU reference"),
    ],
)
def test_what_is_refused(what: str, message: str, found: Any) -> None:
    """The engine does not start, and says what to do instead."""
    assert message in found["refused"][what]


@pytest.mark.feature("`vllm bench throughput`")
def test_bench_throughput(tiny_llama: TinyModel, environment: dict[str, str], tmp_path: Path) -> None:
    """It ends well, and has counted the tokens that were asked for."""
    report = tmp_path / "report.json"
    command = [*CLI, "bench", "throughput", "--model", str(tiny_llama.path), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--dataset-name", "random", "--random-input-len", "24", "--random-output-len"]
    command += ["8", "--num-prompts", "6", "--output-json", str(report)]
    returncode, log = run_group(command, environment, timeout=600)
    assert returncode == 0, log
    result = json.loads(report.read_text())
    assert result["num_requests"] == 6
    assert abs(result["total_num_tokens"] - 6 * (24 + 8)) <= 6  # a prompt is drawn as tokens, and sent as text
