"""Turns a GGUF file of a Llama into a Hugging Face directory: ``python -m vllm_fl.quickstart.convert GGUF DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

#: What the configuration of a model read from GGUF says about its origin, and a plain Llama must not repeat.
_OF_THE_ORIGIN = ("architectures", "dtype", "quantization_config", "torch_dtype", "transformers_version")


def convert(gguf: Path, directory: Path) -> None:
    """Writes configuration, tokenizer (with chat template) and bfloat16 weights of the model in `gguf` to `directory`.

    The weights are dequantised by transformers in float32 and rounded to bfloat16 once. They are put into a model that
    was built from a clean configuration, so nothing in the result refers to GGUF.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    values = {
        key: value
        for key, value in source.config.to_dict().items()
        if key not in _OF_THE_ORIGIN and not key.startswith("_")
    }
    with torch.device("meta"):  # no time spent on random weights
        model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(source.to(torch.bfloat16).state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
