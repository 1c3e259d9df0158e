"""Greedy answers of tiny models in bfloat16: native vLLM against this project, with Triton alone and as installed.

    python benchmarks/native_answers.py --output native_answers.json [--models llama qwen3] [--jobs 4]

Each side of a model runs in a process of its own, on the same random weights. Answers are compared up to the first
token that is not the same, which has to be a tie; the log-probabilities before it may differ a little in the mean (see
TOLERANCE). Exit codes: 0 all sides answer as native vLLM does, 1 one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
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
#: bfloat16 has 8 bits: a log-probability of 6 is one of steps of 0.03. Half of it may send a token to another expert.
TOLERANCE = Tolerance(mean=0.05, tie=0.5)


def answer(folder: str, file: str) -> None:
    """In a process of its own: load the model, and write its answers."""
    import tiny_models
    from token_comparison import engine
    from vllm import SamplingParams

    from vllm_fl.tune.host import answer_of

    rng = random.Random(0)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(PROMPTS)]
    prompts = [[rng.randrange(1, tiny_models.VOCABULARY) for _ in range(length)] for length in lengths]
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=LIKELY)
    settings = {"dtype": "bfloat16", **OPTIONS.get(Path(folder).name, {})}
    with engine(folder, settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
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


def compare(folder: Path, model: str, side: str) -> dict[str, Any]:
    """What a side has in common with native vLLM."""
    line: dict[str, Any] = {"model": model, "side": side}
    files = [folder / model / f"{name}.json" for name in ("native", side)]
    for file in files:
        if not file.exists():
            log = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            return {**line, "error": f"{file.stem} has no answers: {log[-1500:]}"}
    try:
        found = judge(*map(read, files), TOLERANCE)
    except TrialFailed as error:
        return {**line, "error": str(error)}
    if not found:
        return {**line, "error": "no answer has its first token in common"}
    return {
        **line,
        "same": len(found),
        "tokens": PROMPTS * TOKENS,
        "mean": statistics.fmean(found),
        "largest": max(found),
    }


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
        for model in options.models:
            tiny_models.make(model, folder / model)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda each: run(folder, *each), [(m, s) for m in options.models for s in SIDES]))
        lines = [compare(folder, model, side) for model in options.models for side in list(SIDES)[1:]]
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
