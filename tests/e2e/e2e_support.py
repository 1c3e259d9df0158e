"""Processes of their own for what a test runs in vLLM, and a tiny model whose greedy tokens transformers knows."""

from __future__ import annotations

import copy
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """How a process ended: `value` is what its function returned, `log` all that it wrote."""

    returncode: int
    value: Any
    log: str


@dataclass(frozen=True)
class Fresh:
    """Calls functions of a test module in processes of their own."""

    environment: dict[str, str]

    def __call__(
        self,
        function: Callable[..., Any],
        *,
        env: dict[str, str] | None = None,
        timeout: float = 600,
        check: bool = True,
        python: Sequence[str] = (sys.executable,),
        **arguments: Any,
    ) -> Outcome:
        """`function(**arguments)`, with `env` added to the clean environment; arguments and result are JSON.

        With `check`, a process that fails fails the test, with its log.
        """
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            source = inspect.getsourcefile(function)
            command = [*python, str(HERE / "fresh.py"), source, function.__name__, json.dumps(arguments), str(answer)]
            returncode, log = run_group(command, {**self.environment, **(env or {})}, timeout)
            value = json.loads(answer.read_text()) if answer.exists() else None
        if check:
            assert returncode == 0, log
        return Outcome(returncode, value, log)


def run_group(command: Sequence[str | None], env: dict[str, str], timeout: float) -> tuple[int, str]:
    """Run a command in a process group of its own; whatever of the group is left afterwards is killed."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(part) for part in command], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = -signal.SIGKILL
        finally:
            kill_group(process.pid)
        process.wait()
        log.seek(0)
        return returncode, log.read()


def kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class TinyModel:
    """A model of random weights on disk, with a tokenizer of one token a byte and a chat template."""

    path: Path
    _model: Any

    def logits(self, tokens: Sequence[int]) -> Any:
        """Of the token after each of `tokens`, [len(tokens), vocabulary], computed in float32, as float64."""
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([list(tokens)])).logits[0].double()

    def state(self, tokens: Sequence[int]) -> Any:
        """The last state of the last token, [hidden size], float32."""
        import torch

        with torch.inference_mode():
            return self._model.model(torch.tensor([list(tokens)])).last_hidden_state[0, -1]

    def linear_modules(self) -> Iterator[tuple[str, Any]]:
        """(name, module) of every linear layer."""
        import torch

        return ((name, m) for name, m in self._model.named_modules() if isinstance(m, torch.nn.Linear))

    def with_added(self, weights: dict[str, Any], path: Path | None = None) -> TinyModel:
        """The model with these matrices added to the weights of its modules, by name; on disk if there is a path."""
        model = copy.deepcopy(self._model)
        for name, weight in weights.items():
            model.get_submodule(name).weight.data += weight
        if path is not None:
            model.save_pretrained(path)
            save_byte_tokenizer(path)
        return TinyModel(path or self.path, model)

    @property
    def embeddings(self) -> Any:
        """[vocabulary, hidden size]"""
        return self._model.get_input_embeddings().weight.data

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """What transformers continues each prompt with, in float32, one prompt at a time."""
        import torch

        results = []
        for prompt in prompts:
            ids = self._model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            results.append(ids[0, len(prompt) :].tolist())
        return results


def save_byte_tokenizer(path: Path) -> None:
    """A tokenizer with one token a byte, four special tokens, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(path)


#: Token prompts for `make_engine` with its defaults, from one token to 150.
PROMPTS = [[3, 5, 7, 9, 11, 13], list(range(10, 66)), [42], [(7 * i) % 280 + 5 for i in range(150)]]
NEW_TOKENS = 12


def make_engine(model: str, **arguments: Any) -> Any:
    """vLLM's offline engine; `arguments` are its own. To be called in a fresh process."""
    from vllm import LLM

    defaults = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    return LLM(model=model, **{**defaults, **arguments})


def ask(engine: Any, prompts: list[list[int]], **sampling: Any) -> Any:
    """vLLM's answers, greedy and of NEW_TOKENS tokens if `sampling` does not say otherwise."""
    from vllm import SamplingParams

    parameters = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **sampling})
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


def tokens_of(answers: Any) -> list[list[int]]:
    """The tokens of all answers, in order."""
    return [list(output.token_ids) for answer in answers for output in answer.outputs]


def greedy(engine: Any, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """The tokens that the engine continues each prompt with."""
    return tokens_of(ask(engine, prompts, **sampling))
