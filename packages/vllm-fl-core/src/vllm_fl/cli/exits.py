"""Exit codes of every ``vllm-fl`` command, and how a user's mistake becomes one of them without a traceback."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from vllm_fl.errors import ConfigError, FLError


class Exit(IntEnum):
    """What a script can rely on."""

    OK = 0
    FAILED = 1
    """The command ran and failed: an engine or server that does not start, no implementation of an operator."""
    USAGE = 2
    """Wrong arguments or configuration."""
    MISSING = 3
    """The machine lacks something: a package, the network, disk space."""
    INTERRUPTED = 130
    """Ctrl-C."""


class CommandError(FLError, RuntimeError):
    """A failure that the user can act on.

    Args:
        message: what happened, with the names and values concerned.
        remedy: what to do about it.
        code: the exit code.
        log: the file that has the details, if there is one.
    """

    def __init__(self, message: str, remedy: str = "", code: Exit = Exit.FAILED, log: object = None) -> None:
        super().__init__(message)
        self.message, self.remedy, self.code, self.log = message, remedy, code, log

    def __str__(self) -> str:
        lines = [self.message]
        if self.remedy:
            lines.append(f"Remedy: {self.remedy}")
        if self.log:
            lines.append(f"Log: {self.log}")
        return "\n".join(lines)


@contextmanager
def user_errors(as_json: bool = False) -> Iterator[None]:
    """Reports what the user can mend and exits with its code; anything else is a bug and keeps its traceback.

    With `as_json` the error is one JSON object on standard output: ``error``, ``remedy``, ``log``, ``exit_code``.
    """
    import typer

    try:
        yield
    except CommandError as error:
        _report(as_json, error.code, str(error), error.message, error.remedy, error.log)
        raise typer.Exit(error.code) from None
    except FLError as error:
        code = Exit.USAGE if isinstance(error, ConfigError) else Exit.FAILED
        _report(as_json, code, str(error), str(error))
        raise typer.Exit(code) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        remedy = "Make room or choose another place (XDG_CACHE_HOME moves the cache, TMPDIR the temporary files)."
        _report(as_json, Exit.MISSING, f"{error}\nRemedy: {remedy}", str(error), remedy)
        raise typer.Exit(Exit.MISSING) from None
    except KeyboardInterrupt:
        _report(as_json, Exit.INTERRUPTED, "Interrupted.", "interrupted")
        raise typer.Exit(Exit.INTERRUPTED) from None


@contextmanager
def logged(log: object) -> Iterator[None]:
    """Adds `log`, which has the details, to a CommandError that names none."""
    try:
        yield
    except CommandError as error:
        error.log = error.log or log
        raise


def _report(as_json: bool, code: Exit, text: str, message: str, remedy: str = "", log: object = None) -> None:
    if as_json:
        document = {"error": message, "remedy": remedy, "log": str(log) if log else None, "exit_code": int(code)}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    prefix = "" if code is Exit.INTERRUPTED else "Error: "
    Console(stderr=True, soft_wrap=True).print(Text(prefix, style="bold red") + Text(text))
