"""Greedy tokens of a checkpoint of tiny_models.py in vLLM and in transformers.

vLLM and torch are imported in the functions: they run in processes of their own, with that process's settings.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 128, 300)
NEW_TOKENS = 8
#: Tokens are compared where the likeliest leads by this much; float32 differs by some 1e-5.
LEAST_MARGIN = 2e-3


def draw_prompts(
    model: Any, lengths: Sequence[int] = LENGTHS, least_margin: float = LEAST_MARGIN
) -> list[tuple[list[int], list[int], float]]:
    """(prompt, transformers' continuation, margin) for every length, and a prompt that shares a long prefix."""
    import tiny_models
    import torch

    random = torch.Generator().manual_seed(1)
    found: list[tuple[list[int], list[int], float]] = []
    for length in (*lengths, -1):
        while True:
            prompt = torch.randint(
                1, tiny_models.VOCABULARY, (abs(length) if length > 0 else 30,), generator=random
            ).tolist()
            if length < 0:
                prompt = found[-1][0][:200] + prompt
            answer = tiny_models.greedy(model, prompt, NEW_TOKENS)
            if answer.margin > least_margin:
                found.append((prompt, answer.tokens, answer.margin))
                break
    return found


@contextmanager
def engine(path: str, settings: dict[str, Any]) -> Iterator[Any]:
    """vLLM in float32, eager, on the checkpoint; `settings` are further arguments of ``vllm.LLM``."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    spare_inspection(path)
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 400,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 32 << 20,
        "enforce_eager": True,
        "seed": 0,
    }
    if current_platform.device_type != "cpu":
        arguments["gpu_memory_utilization"] = 0.05  # several engines share the device
    llm = LLM(model=path, **{**arguments, **settings})
    yield llm
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def spare_inspection(path: str) -> None:
    """Import the checkpoint's model class here; vLLM would start a process to ask about it, which takes ten seconds."""
    from vllm import ModelRegistry

    for name in json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))["architectures"]:
        known = ModelRegistry.models.get(name)
        if hasattr(known, "load_model_cls"):
            ModelRegistry.register_model(name, known.load_model_cls())


def ask(llm: Any, prompts: list[list[int]], together: bool) -> tuple[list[list[int]], list[int]]:
    """Continuations, and how many prompt tokens came from the cache."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    batches = [requests] if together else [[request] for request in requests]
    answers = [answer for batch in batches for answer in llm.generate(batch, greedy, use_tqdm=False)]
    return [list(answer.outputs[0].token_ids) for answer in answers], [answer.num_cached_tokens for answer in answers]
