"""How a user's mistake becomes an exit code and a message, without a traceback."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_fl.errors import CommandError, Exit, FLError


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
        _report(as_json, error.exit_code, str(error), str(error))
        raise typer.Exit(error.exit_code) from None
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        _report(as_json, Exit.USAGE, str(error), str(error), "Name another path.")
        raise typer.Exit(Exit.USAGE) from None
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
