"""Answers a few chat prompts with vLLM, in this process.

    python examples/offline_inference.py                 # with the quickstart model (prepared at the first run)
    python examples/offline_inference.py MODEL           # with any model: a directory, or a name that vLLM can fetch

Nothing here names vllm-fl's dispatch: vLLM finds the plug-in by its entry points, and this is an ordinary vLLM script.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

PROMPTS = (
    "What is the name of the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
)


def quickstart_model() -> str:
    """The directory of the model that `vllm-fl quickstart` uses; downloads and converts it if it is not there."""
    from vllm_fl.quickstart import prepare_model

    return str(prepare_model())


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a few chat prompts with vLLM.")
    parser.add_argument("model", nargs="?", help="directory or name of a model (default: the quickstart model)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--max-tokens", type=int, default=48, help="length of an answer, at most")
    parser.add_argument("--compile", action="store_true", help="use torch.compile: starts slower, answers faster")
    arguments = parser.parse_args()

    llm = LLM(
        model=arguments.model or quickstart_model(),
        dtype=arguments.dtype,
        enforce_eager=not arguments.compile,
        max_model_len=1024,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, llm.chat(chats, sampling, use_tqdm=False), strict=True):
        print(f"Prompt: {prompt}\nAnswer: {output.outputs[0].text.strip()}\n")


if __name__ == "__main__":  # vLLM's engine process may import this file again
    main()
