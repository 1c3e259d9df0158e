"""Engines of vLLM for what runs a model: quickstart, profile, compare, bisect, tune."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from vllm_fl.errors import CommandError, Exit, FLError

#: Sets the process that the engine runs in: "0" is that of the caller.
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
#: Key in ``additional_config``: layers go through dispatch where vLLM's own would call the chosen kernels, too.
ALL_LAYERS = "vllm_fl_all_layers"
ENGINE_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local directory
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens, answered greedily and to their full length.

    Args:
        requests: how many are given at once.
        input_tokens: length of each prompt.
        output_tokens: length of each answer.
        seed: of the prompts.
    """

    requests: int = 8
    input_tokens: int = 64
    output_tokens: int = 16
    seed: int = 0

    def prompts(self, vocabulary: int, variant: int = 0) -> list[list[int]]:
        """Token ids below `vocabulary`; other ones for each `variant`, so that no prefix is cached."""
        rng = random.Random(f"{self.seed}/{variant}")
        low = min(100, vocabulary // 2)  # small ids are often special tokens
        return [[rng.randrange(low, vocabulary) for _ in range(self.input_tokens)] for _ in range(self.requests)]

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.input_tokens} tokens in, {self.output_tokens} out"


class Engine:
    """A running engine; as a context manager it ends with the block.

    Args:
        arguments: those of vLLM's ``LLM``, the model among them.
        extension: path of the class whose methods :meth:`call` names; mixed into the workers by vLLM.
        in_process: whether the engine runs in this process, which makes its scheduling reproducible; else vLLM's own
            choice.
        all_layers: whether every layer that can go through dispatch does; else vLLM's own stay where their vendor's
            implementations are chosen, which then cannot be exchanged for others.

    Raises:
        CommandError: vLLM is missing, the engine does not start, or `arguments` has an extension of its own.
    """

    def __init__(
        self, arguments: Mapping[str, Any], extension: str = "", *, in_process: bool = False, all_layers: bool = False
    ) -> None:
        if arguments.get("worker_extension_cls"):
            remedy = "Leave --worker-extension-cls out: vLLM takes one, and it is this tool's."
            raise CommandError("The workers have an extension already.", remedy, Exit.USAGE)
        require_vllm()
        self.model = str(arguments["model"])
        if all_layers:
            additional = {**(arguments.get("additional_config") or {}), ALL_LAYERS: True}
            arguments = {**arguments, "additional_config": additional}
        with _environment(in_process, is_local=Path(self.model).is_dir()):
            try:
                from vllm import LLM

                self._llm: Any = LLM(**{"seed": 0, **arguments, "worker_extension_cls": extension})
            except FLError:
                raise
            except Exception as error:
                raise start_failure(error) from error

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its processes."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self._llm.llm_engine.model_config.get_vocab_size())

    @property
    def max_length(self) -> int:
        """The longest sequence that the engine takes, in tokens."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    @property
    def config(self) -> Any:
        """The configuration of the engine, vLLM's ``VllmConfig``."""
        return self._llm.llm_engine.vllm_config

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[list[int]]:
        """The tokens that the model continues each prompt with, greedily, `output_tokens` of them.

        Raises:
            CommandError: a prompt and its answer are longer than the model allows.
        """
        return [list(output.outputs[0].token_ids) for output in self.outputs(prompts, output_tokens)]

    def outputs(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, *, logprobs: int | None = None
    ) -> list[Any]:
        """As :meth:`generate`, vLLM's ``RequestOutput`` of each prompt.

        No step begins before the engine has all requests, so that the same ones are scheduled in the same way.

        Args:
            prompts, output_tokens: as for :meth:`generate`.
            logprobs: of how many likely tokens the log-probabilities are kept; None keeps none.
        """
        from vllm import SamplingParams

        longest = max(map(len, prompts)) + output_tokens
        if longest > self.max_length:
            text = f"{longest} tokens a request are more than the {self.max_length} that the engine takes."
            raise CommandError(text, "Shorten the input or the output, or pass --max-model-len to vLLM.", Exit.USAGE)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with held(self._llm):
            self._llm.enqueue(inputs, sampling, use_tqdm=False)
        return list(self._llm.wait_for_completion(use_tqdm=False))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What the method of this name answers in each worker, rank by rank."""
        return list(self._llm.collective_rpc(method, args=arguments))


@contextmanager
def held(llm: Any) -> Iterator[None]:
    """No step of vLLM's ``LLM`` begins in the block, so that what is enqueued there is scheduled in the same way."""
    llm.sleep(level=0, mode="keep")  # the scheduler alone
    try:
        yield
    finally:
        llm.wake_up(tags=["scheduling"])


def engine_arguments(model: str, extra: Sequence[str]) -> dict[str, Any]:
    """The arguments of ``LLM`` that ``vllm serve MODEL EXTRA...`` would have.

    Raises:
        CommandError: vLLM is missing, or does not know one of `extra`.
    """
    require_vllm()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            remedy = "What follows the model is vLLM's; `vllm serve --help=all` lists it."
            raise CommandError(f"vLLM does not take these arguments: {message}.", remedy, Exit.USAGE)

    parser = EngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
    parsed, default = (
        vars(EngineArgs.from_cli_args(parser.parse_args(["--model", model, *given]))) for given in (extra, ())
    )
    # What is not the default alone: LLM has defaults of its own.
    return {name: value for name, value in parsed.items() if name == "model" or value != default[name]}


@contextmanager
def _environment(in_process: bool, is_local: bool) -> Iterator[None]:
    wanted = dict(ENGINE_ENVIRONMENT)
    if not is_local:
        del wanted["HF_HUB_OFFLINE"]
    if in_process:
        wanted[MULTIPROCESSING] = "0"
    wanted["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_failure(error: Exception) -> CommandError:
    """What the user gets for whatever vLLM raised: its type and first line; the traceback is printed, for the log."""
    traceback.print_exc()
    lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    remedy = f"{variables_remedy()}Run again with --verbose to see what vLLM says."
    return CommandError(f"The engine did not start: {': '.join(lines)}", remedy)


def variables_remedy() -> str:
    """Names the variables that keep a platform out, if any is set."""
    names = ("VLLM_PLUGINS", "VLLM_FL_PREFER_ENABLED", "VLLM_TARGET_DEVICE", "VLLM_FL_PLATFORM", "VLLM_FL_CONFIG")
    own = os.path.join(tempfile.gettempdir(), "vllm-fl-")  # the file of a policy that a command has made
    present = [f"{name}={os.environ[name]}" for name in names if not os.environ.get(name, own).startswith(own)]
    return f"These variables are set and may be the reason: {', '.join(present)}. " if present else ""


def require_vllm() -> None:
    """Raises CommandError where torch or vLLM is not installed."""
    for module in ("torch", "vllm"):
        if find_spec(module) is None:
            raise CommandError(
                f"The package {module} is not installed.",
                "On a clone, `make quickstart` makes an environment that has it; elsewhere install it first.",
                Exit.MISSING,
            )


@contextmanager
def output_to(log: Path | None) -> Iterator[None]:
    """Sends everything that this process and its libraries print to `log`, or all of it to standard error if None.

    It works below Python's streams, so it catches compiled code too. Who wants to write to the terminal meanwhile needs
    a duplicate of the descriptor made before.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        if log is None:
            os.dup2(2, 1)
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
