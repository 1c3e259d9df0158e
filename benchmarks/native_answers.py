"""Greedy answers of tiny models in bfloat16: native vLLM against this project, with Triton alone and as installed.

    python benchmarks/native_answers.py --output native_answers.json [--models llama qwen3] [--jobs 4]

Each side of a model runs in a process of its own, on the same random weights. Two comparisons have to hold:

- with native vLLM: answers are compared up to the first token that is not the same, which has to be a tie, but where
  tokens have experts; the log-probabilities before it may differ a little in the mean (TOLERANCE).
- with transformers in float32 on the same weights, rounded to bfloat16, which is given each side's own tokens: the
  side's log-probabilities are hardly further from it than native vLLM's (NO_FURTHER).

Exit codes: 0 they hold for all sides, 1 one does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sides import version

from vllm_fl.tune.gate import Answer, Tolerance, judge
from vllm_fl.tune.trials import TrialFailed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

SIDES = {"native": {"VLLM_PLUGINS": ""}, "triton": {"VLLM_FL_PREFER": "flagos"}, "vendor": {}}
MODELS = ("llama", "qwen3", "qwen3_moe", "qwen3_next")
LENGTHS = (1, 2, 17, 64, 300)
PROMPTS, TOKENS, LIKELY = 20, 64, 8
#: Further options of engines. vLLM chooses FlashInfer for Qwen3-Next on Hopper, whether it is installed or not.
OPTIONS: dict[str, dict[str, Any]] = {"qwen3_next": {"gdn_prefill_backend": "triton"}}
#: bfloat16 has 8 bits: a log-probability of 6 is one of steps of 0.03.
TOLERANCE = Tolerance(mean=0.05, tie=0.5)
#: Half a step may send a token to another expert, and what follows may then be anything.
WITH_EXPERTS = Tolerance(mean=0.1, tie=math.inf)
#: How many times as far as native vLLM a side may be from float32. The few tokens with other experts make the mean.
NO_FURTHER = {"median": 1.1, "90 %": 1.1, "mean": 1.25}


def prompts(vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(PROMPTS)]
    return [[rng.randrange(1, vocabulary) for _ in range(length)] for length in lengths]


def answer(folder: str, file: str) -> None:
    """In a process of its own: load the model, and write its answers."""
    import tiny_models
    from token_comparison import engine
    from vllm import SamplingParams

    from vllm_fl.tune.host import answer_of

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=LIKELY)
    settings = {"dtype": "bfloat16", **OPTIONS.get(Path(folder).name, {})}
    with engine(folder, settings) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(tiny_models.VOCABULARY)]
        outputs = llm.generate(inputs, greedy, use_tqdm=False)
    Path(file).write_text(json.dumps([asdict(answer_of(output)) for output in outputs]), encoding="utf-8")


def read(file: Path) -> list[Answer]:
    answers = json.loads(file.read_text(encoding="utf-8"))
    return [
        Answer(each["tokens"], [{int(token): value for token, value in at.items()} for at in each["likely"]])
        for each in answers
    ]


def run(folder: Path, model: str, side: str) -> None:
    """The answers of a side to ``SIDE.json`` in the model's folder, the log to ``SIDE.log``."""
    command = [sys.executable, __file__, "--answer", str(folder / model), str(folder / model / f"{side}.json")]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **SIDES[side]}
    with (folder / model / f"{side}.log").open("wb") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)


def distances(model: Any, answers: list[Answer]) -> dict[str, float]:
    """How far the log-probabilities of answers are from those of transformers' model, in nats."""
    import torch

    found = []
    for prompt, answer in zip(prompts(model.config.vocab_size), answers, strict=True):
        given = torch.tensor([[*prompt, *answer.tokens]], device=model.device)
        with torch.inference_mode():
            logits = model(given, use_cache=False).logits[0, len(prompt) - 1 : -1]
        at = torch.tensor(answer.tokens, device=model.device)[:, None]
        wanted = logits.log_softmax(-1).gather(1, at)[:, 0].tolist()
        found += [abs(w - got[t]) for w, got, t in zip(wanted, answer.likely, answer.tokens, strict=True)]
    found.sort()
    return {"median": found[len(found) // 2], "90 %": found[len(found) * 9 // 10], "mean": statistics.fmean(found)}


def compare(folder: Path, name: str, model: Any) -> Iterator[dict[str, Any]]:
    """A line a side: how far it is from float32, and what it has in common with native vLLM."""
    native: list[Answer] = []
    base: dict[str, float] = {}
    for side in SIDES:
        line: dict[str, Any] = {"model": name, "side": side}
        file = folder / name / f"{side}.json"
        if not file.exists():
            log = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            yield {**line, "error": f"no answers: {log[-1500:]}"}
            continue
        answers = read(file)
        line["from float32"] = distance = distances(model, answers)
        if side == "native":
            native, base = answers, distance
        elif native:
            line |= beside_native(native, answers, hasattr(model.config, "num_experts"))
            line["times as far as native"] = further = {what: distance[what] / base[what] for what in distance}
            if any(further[what] > most for what, most in NO_FURTHER.items()):
                problem = f"further from float32 than native vLLM; {NO_FURTHER} times are allowed"
                line["error"] = "; ".join(filter(None, (line.get("error"), problem)))
        yield line


def beside_native(native: list[Answer], answers: list[Answer], has_experts: bool) -> dict[str, Any]:
    try:
        found = judge(native, answers, WITH_EXPERTS if has_experts else TOLERANCE)
    except TrialFailed as error:
        return {"error": str(error)}
    if not found:
        return {"error": "no answer has its first token in common with native vLLM's"}
    mean, largest = statistics.fmean(found), max(found)
    return {"same": len(found), "tokens": PROMPTS * TOKENS, "mean": mean, "largest": largest}


def in_bfloat16(model: Any) -> Any:
    """With weights rounded as vLLM rounds them, on the accelerator if there is one."""
    import torch

    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.to(torch.accelerator.current_accelerator() or "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time (default: 4)")
    parser.add_argument("--output", type=Path, help="write the results to this file as well")
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(*options.answer)
        return 0
    import tiny_models

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {name: tiny_models.make(name, folder / name) for name in options.models}
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda each: run(folder, *each), [(m, s) for m in options.models for s in SIDES]))
        lines = [line for name, model in models.items() for line in compare(folder, name, in_bfloat16(model))]
    for line in lines:
        print(json.dumps(line))
    if options.output:
        versions = {each: version(each) for each in ("vllm", "torch", "triton", "vllm-fl-core")}
        options.output.write_text(
            json.dumps({"versions": versions, "results": lines}, indent=1) + "\n", encoding="utf-8"
        )
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
