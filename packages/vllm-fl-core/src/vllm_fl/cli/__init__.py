"""The command line ``vllm-fl``.

Each command is one module in :mod:`vllm_fl.cli.commands`. Importing this package imports none of them, and a command
imports torch and vLLM only when it runs, so that help is there at once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments`, by default those of the process; returns a :class:`~vllm_fl.errors.Exit`."""
    from vllm_fl.cli.app import run

    return run(arguments)
