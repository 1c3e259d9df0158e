"""Answers prompts with an in-process vLLM engine and counts which implementation served each operator."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.cli.exits import CommandError, Exit
from vllm_fl.errors import FLError

if TYPE_CHECKING:
    from vllm_fl.plugins import PlatformChoice

# The model is sure of the first of these: its answer is the same in every dtype and with every order of summation
PROMPTS = (
    "What is the name of the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Give me three ideas for a rainy afternoon.",
)
DTYPES = ("bfloat16", "float16", "float32")
ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the counters live in the process of the engine
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local directory
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Answer:
    """One prompt, the text of the answer, and its length in tokens."""

    prompt: str
    text: str
    tokens: int


@dataclass(frozen=True)
class OperatorUse:
    """How often one implementation served one operator: while the engine started, and while it answered."""

    operator: str
    implementation: str
    kind: str
    vendor: str | None
    calls_at_start: int
    calls: int


@dataclass(frozen=True)
class Report:
    """What a run of the quickstart found out. Times are seconds."""

    model: str
    dtype: str
    compiled: bool
    platform: str
    platform_reason: str
    versions: Mapping[str, str]
    answers: tuple[Answer, ...]
    operators: tuple[OperatorUse, ...]
    start_s: float
    answer_s: float

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self)


class Session:
    """A running engine on one model.

    Args:
        model: directory of the model.
        dtype: one of `DTYPES`.
        compiled: whether torch.compile is used; eager starts faster, compiled answers faster.

    Raises:
        CommandError: vLLM is missing, or the engine does not start.
        FLError: the configuration of vllm-fl is wrong.
    """

    def __init__(self, model: Path, dtype: str, compiled: bool) -> None:
        require_vllm()
        os.environ.update(ENGINE_ENVIRONMENT)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self.model, self.dtype, self.compiled = model, dtype, compiled
        begin = time.perf_counter()
        # Before the engine: a wrong configuration is to be told in our words, not through vLLM's
        from vllm_fl.dispatch import get_default_manager
        from vllm_fl.plugins import resolve_platform

        self._choice = resolve_platform()
        self._manager = get_default_manager()
        self._manager.count_calls(True)
        self._llm = _start(model, dtype, compiled, self._choice)
        self._at_start = self._manager.call_counts()
        self._start_s = time.perf_counter() - begin

    def answer(self, prompts: Sequence[str], max_tokens: int) -> Report:
        """Answers `prompts`, each a chat of its own, greedily and in one batch."""
        from vllm import SamplingParams

        begin = time.perf_counter()
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = self._llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
        seconds = time.perf_counter() - begin
        pairs = [(prompt, output.outputs[0]) for prompt, output in zip(prompts, outputs, strict=True)]
        return Report(
            model=str(self.model),
            dtype=self.dtype,
            compiled=self.compiled,
            platform=self._choice.plugin.name if self._choice.plugin else "vLLM's own",
            platform_reason=self._choice.reason,
            versions=_versions(),
            answers=tuple(Answer(prompt, best.text.strip(), len(best.token_ids)) for prompt, best in pairs),
            operators=self._operators(),
            start_s=self._start_s,
            answer_s=seconds,
        )

    def _operators(self) -> tuple[OperatorUse, ...]:
        uses = []
        for (operator, impl_id), calls in sorted(self._manager.call_counts().items()):
            implementation = self._manager.registry.get_implementation(operator, impl_id)
            kind, vendor = (implementation.kind.value, implementation.vendor) if implementation else ("unknown", None)
            before = self._at_start.get((operator, impl_id), 0)
            uses.append(OperatorUse(operator, impl_id, kind, vendor, before, calls - before))
        return tuple(uses)

    def close(self) -> None:
        """Ends the engine and stops counting."""
        self._llm.llm_engine.engine_core.shutdown()
        self._manager.count_calls(False)


def _start(model: Path, dtype: str, compiled: bool, choice: PlatformChoice) -> Any:
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        if not current_platform.device_type:
            raise CommandError(f"No platform fits this machine: {choice.reason}", _platform_remedy(choice))

        return LLM(
            model=str(model),
            dtype=dtype,
            enforce_eager=not compiled,
            max_model_len=2048,
            max_num_seqs=16,
            kv_cache_memory_bytes=512 << 20,
            seed=0,
            disable_log_stats=True,
        )
    except FLError:
        raise
    except Exception as error:
        raise start_failure(error) from error


def start_failure(error: Exception) -> CommandError:
    """What the user gets for whatever vLLM raised: its type and first line; the traceback is printed, for the log."""
    traceback.print_exc()
    lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    return CommandError(f"The engine did not start: {': '.join(lines)}", _start_remedy())


def _platform_remedy(choice: PlatformChoice) -> str:
    rejected = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)
    hint = f"The installed backends say: {rejected}. " if rejected else "Install a backend, such as vllm-fl-reference. "
    return hint + _variables_remedy()


def _start_remedy() -> str:
    return f"{_variables_remedy()}Run again with --verbose to see what vLLM says."


def _variables_remedy() -> str:
    """Names the variables that keep a platform out, if any is set."""
    names = ("VLLM_PLUGINS", "VLLM_FL_PREFER_ENABLED", "VLLM_TARGET_DEVICE", "VLLM_FL_PLATFORM", "VLLM_FL_CONFIG")
    present = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
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


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm-fl-core", "vllm-fl-reference", "vllm", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
