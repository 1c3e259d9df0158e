"""Puts the commands together. A new command is one module in :mod:`vllm_fl.cli.commands`, named here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

import typer

from vllm_fl.version import __version__

COMMANDS = (
    *("quickstart", "info", "explain", "config"),
    *("profile", "tune", "compare", "bisect"),
    *("conformance", "new_backend"),
)
"""Modules of `vllm_fl.cli.commands` in the order of the help; each has ``register(app)``."""


def build_app() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="vllm-fl",
        help="One unmodified vLLM on any chip.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong arguments or configuration, 3 something is missing, 130 Ctrl-C.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for name in COMMANDS:
        import_module(f"vllm_fl.cli.commands.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-fl {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """One unmodified vLLM on any chip."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the application; returns the exit code instead of ending the process."""
    # Where a command loads vLLM, what that logs must not get into what the command prints.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        build_app()(args=None if arguments is None else list(arguments), prog_name="vllm-fl")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
