"""What the commands that run a model do first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_fl.cli.exits import logged

if TYPE_CHECKING:
    from vllm_fl.progress import Reporter


class Running(NamedTuple):
    """The directory or name of the model, what vLLM's ``LLM`` takes for it, and who shows the steps."""

    directory: str
    arguments: dict[str, Any]
    reporter: Reporter


@contextmanager
def run_model(model: str, extra: Sequence[str], log: Path | None) -> Iterator[Running]:
    """Within the block all that vLLM prints goes to `log`, or to standard error if None.

    Args:
        model: as for ``vllm serve``, or the word for the quickstart's.
        extra: arguments of vLLM's.
        log: the file, which a CommandError of the block then names.

    Raises:
        CommandError: vLLM is missing, or does not know one of `extra`; the model cannot be prepared.
    """
    from vllm_fl.engines import engine_arguments, output_to
    from vllm_fl.progress import Reporter
    from vllm_fl.quickstart.model import model_directory

    # On a descriptor of its own: the streams of this process go to the log.
    with os.fdopen(os.dup(2), "w", buffering=1) as terminal:
        reporter = Reporter(terminal, live=log is not None)
        directory = model_directory(model, reporter)
        with logged(log), output_to(log):
            with reporter.step("Load vLLM"):
                arguments = engine_arguments(directory, extra)
            yield Running(directory, arguments, reporter)
