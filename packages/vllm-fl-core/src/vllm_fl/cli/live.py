"""The running processes that a command asks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_fl.errors import CommandError, Exit

if TYPE_CHECKING:
    from vllm_fl.diagnostics import LiveProcess


def answers(directory: Path) -> list[LiveProcess]:
    """What the processes of `directory` say.

    Raises:
        CommandError: there is no such directory, nothing runs that left a file there, or it is somebody else's.
    """
    from vllm_fl.diagnostics import ask_processes

    remedy = f"Start the server with VLLM_FL_TRACE_DIR={directory} in its environment."
    try:
        processes = ask_processes(directory)
    except FileNotFoundError:
        raise CommandError(f"There is no directory {directory}.", remedy, Exit.MISSING) from None
    except PermissionError as error:
        remedy = "Ask as the user who started the server."
        raise CommandError(f"A process of {directory} cannot be asked: {error}.", remedy) from None
    if not processes:
        raise CommandError(f"No running process has left a file in {directory}.", remedy, Exit.MISSING)
    return processes
