"""Answers prompts with an in-process vLLM engine and counts which implementation served each operator."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.engines import ENGINE_ENVIRONMENT, MULTIPROCESSING, require_vllm, start_failure, variables_remedy
from vllm_fl.errors import CommandError, FLError

if TYPE_CHECKING:
    from vllm_fl.plugins import PlatformChoice

# The model is sure of the first of these: its answer is the same in every dtype and with every order of summation
PROMPTS = (
    "What is the name of the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Give me three ideas for a rainy afternoon.",
)
DTYPES = ("bfloat16", "float16", "float32")


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
        os.environ.update({**ENGINE_ENVIRONMENT, MULTIPROCESSING: "0"})  # the counters live in the engine's process
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

        from vllm_fl.diagnostics.versions import versions

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
            versions=versions(),
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


def _platform_remedy(choice: PlatformChoice) -> str:
    rejected = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)
    hint = f"The installed backends say: {rejected}. " if rejected else "Install a backend, such as vllm-fl-reference. "
    return hint + variables_remedy()
