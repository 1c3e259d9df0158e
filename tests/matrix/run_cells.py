"""Compares models with transformers on the vLLM of this Python: ``python run_cells.py ANSWERS MODEL...``.

A model is a name of tiny_models.py. ``-mla`` after it asks for latent attention in the place of plain heads, and
``-compiled`` for torch.compile in the place of eager execution.
Each model adds one line of JSON to the file ANSWERS: outcome ("passed", "failed" or "cannot run"), reason and seconds.
A model that was served without dispatch has not passed. The process ends after a failure, with code 3, since an engine
may be left behind: scripts/matrix.py starts the next for the models that remain.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

PROMPTS = (1, 2, 17, 64, 300)
#: Long prompts in pieces, and repeated ones from the prefix cache; four sequences at a time.
SETTINGS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 72,
    "max_num_seqs": 4,
}
ROUNDS = ("together", "alone")


class CannotRun(Exception):
    """One of the two sides does not know the model."""


def main(answers: str, *names: str) -> int:
    for name in names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome, reason = judge(name, folder)
        seconds = round(time.monotonic() - start)
        line = {"model": name, "outcome": outcome, "reason": reason, "seconds": seconds}
        with Path(answers).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if outcome == "failed":
            return 3
    return 0


def judge(name: str, folder: str) -> tuple[str, str]:
    """(outcome, reason)"""
    import traceback

    declare_vision_operators()
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.errors import NoImplementationError

    manager = get_default_manager()
    manager.count_calls(True)
    before = sum(manager.call_counts().values())
    model, *variant = name.split("-")
    os.environ["VLLM_MLA_DISABLE"] = "0" if "mla" in variant else "1"
    try:
        if model in encoders():
            outcome, reason = compare_embeddings(model, folder)
        else:
            outcome, reason = compare_tokens(model, folder, {**SETTINGS, "enforce_eager": "compiled" not in variant})
    except (CannotRun, NoImplementationError, NotImplementedError) as error:
        outcome, reason = "cannot run", " ".join(str(error).split())
    except Exception as error:
        traceback.print_exc()
        outcome, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    if outcome == "passed" and sum(manager.call_counts().values()) == before:
        outcome, reason = "failed", "no operator was called through dispatch"
    return outcome, reason


@functools.cache
def declare_vision_operators() -> None:
    """Make torchvision importable, if its build is for a CUDA torch and could not load its operators here.

    vLLM imports it with models whose vision part is not used here. The build from PyPI is of that sort.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


#: They vanish with their Library.
_libraries: list[Any] = []


def encoders() -> Any:
    import tiny_models

    return tiny_models.ENCODERS


def checkpoint(name: str, folder: str) -> Any:
    """The model of transformers.

    Raises:
        CannotRun: one of the two does not know it.
    """
    import tiny_models
    import transformers
    import vllm

    try:
        model = tiny_models.make(name, Path(folder))
    except AttributeError as error:
        if not str(error).startswith("module transformers has no attribute"):
            raise
        what = str(error).rsplit(maxsplit=1)[-1].strip("'")
        raise CannotRun(f"transformers {transformers.__version__} has no {what}") from None
    architecture = model.config.architectures[0]
    if architecture not in vllm.ModelRegistry.get_supported_archs():
        raise CannotRun(f"vLLM {vllm.__version__} has no {architecture}")
    return model


def compare_tokens(name: str, folder: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Greedy tokens in float32, several prompts together and each alone."""
    from token_comparison import ask, draw_prompts, engine

    drawn = draw_prompts(checkpoint(name, folder), PROMPTS)
    prompts = [prompt for prompt, _, _ in drawn]
    with engine(folder, settings) as llm:
        outputs = {label: ask(llm, prompts, label == "together")[0] for label in ROUNDS}
    wrong = [
        f"{len(prompt)} {label}"
        for label, answers in outputs.items()
        for (prompt, expected, _), answer in zip(drawn, answers, strict=True)
        if answer != expected
    ]
    return ("failed", f"other tokens after the prompts of {', '.join(wrong)}") if wrong else ("passed", "")


def compare_embeddings(name: str, folder: str) -> tuple[str, str]:
    """The normalised state of the first token, in float32."""
    import tiny_models
    import torch
    from e2e_support import save_byte_tokenizer
    from token_comparison import engine

    model = checkpoint(name, folder)
    save_byte_tokenizer(Path(folder))
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, tiny_models.VOCABULARY, (length,), generator=random).tolist() for length in PROMPTS]
    settings = {"runner": "pooling", "max_num_seqs": 4, "skip_tokenizer_init": False}
    with engine(folder, settings) as llm:
        answers = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    distance = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            state = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        distance = max(distance, float((torch.tensor(answer.outputs.embedding) - state / state.norm()).abs().max()))
    return ("passed", "") if distance < 1e-5 else ("failed", f"embeddings differ by {distance:.1e}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
    sys.exit(main(*sys.argv[1:]))
