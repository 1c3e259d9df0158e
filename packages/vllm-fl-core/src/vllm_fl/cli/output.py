"""How the commands print: tables for people, one JSON document for programs. ``NO_COLOR`` is rich's own."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_json(document: Any) -> None:
    """One JSON document on standard output.

    Sets become sorted lists; paths and the like, and numbers that JSON does not know (``inf``, ``nan``), become text.
    """
    sys.stdout.write(json.dumps(_finite(document), indent=2, default=_plain, allow_nan=False) + "\n")


def console() -> Console:
    """The console for tables; text that leads nowhere but to a file is as wide as it needs."""
    from rich.console import Console

    made = Console(highlight=False, soft_wrap=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 160
    return made


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """A table of plain text; columns named in `right` are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def examples(*lines: str) -> str:
    """An epilog of a command's help that shows how it is called."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"$ vllm-fl {line.replace('[', chr(92) + '[')}" for line in lines)])


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
