"""Fresh processes with a clean environment, and a tiny model whose greedy tokens are known from transformers."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

#: Everything that a process inherits from the environment of the tests; the rest might be a developer's setting.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS", "CXX", "CPATH", "LIBRARY_PATH", "PYTHONPATH")


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
        timeout: float = 240,
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
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A clean environment: a home and caches of this session, no network, no usage report."""
    home = tmp_path_factory.mktemp("home")
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {
        **inherited,
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="session")
def fresh(environment: dict[str, str]) -> Fresh:
    return Fresh(environment)


@dataclass(frozen=True)
class TinyModel:
    """A model of random weights on disk, with a tokenizer of one token a byte and a chat template."""

    path: Path
    _model: Any

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """What transformers continues each prompt with, in float32, one prompt at a time."""
        import torch

        results = []
        for prompt in prompts:
            ids = self._model.generate(
                torch.tensor([list(prompt)]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            results.append(ids[0, len(prompt) :].tolist())
        return results


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(path)
    save_byte_tokenizer(path)
    yield TinyModel(path, model)


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
