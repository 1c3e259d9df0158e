"""Shows a report of the quickstart to a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_fl.quickstart.engine import Report


def show(report: Report, console: Console) -> None:
    """Prints the answers, the table of operators and how long it took."""
    from rich.markup import escape
    from rich.panel import Panel
    from rich.text import Text

    for answer in report.answers:
        console.print(Panel(Text(answer.text), title=escape(answer.prompt), title_align="left"))
    console.print(operator_table(report))
    for note in notes(report):
        console.print(note, highlight=False)
    versions = report.versions
    console.print(
        f"Platform {report.platform} ({report.platform_reason}); vLLM {versions.get('vllm')}, "
        f"torch {versions.get('torch')}, {report.dtype}, {'compiled' if report.compiled else 'eager'}.",
        highlight=False,
    )
    tokens = sum(answer.tokens for answer in report.answers)
    console.print(
        f"Engine started in {report.start_s:.1f} s; {tokens} tokens in {report.answer_s:.1f} s "
        f"({tokens / report.answer_s:.0f} tokens/s).",
        highlight=False,
    )


def operator_table(report: Report) -> Table:
    """One row an implementation that served calls."""
    from rich.table import Table

    table = Table(title="Which implementation served each operator", title_justify="left")
    for column in ("operator", "implementation", "kind"):
        table.add_column(column)
    for column in ("calls at start", "calls"):
        table.add_column(column, justify="right")
    for use in report.operators:
        kind = f"{use.kind} ({use.vendor})" if use.vendor else use.kind
        table.add_row(use.operator, use.implementation, kind, f"{use.calls_at_start:,}", f"{use.calls:,}")
    return table


def notes(report: Report) -> list[str]:
    """What the reader of the table has to know."""
    found = []
    if not report.operators:
        found.append("No operator went through dispatch: vLLM runs on a platform of its own.")
    if report.compiled:
        found.append(
            "A compiled graph runs without calls of Python: an operator traced into it counts once at the start, "
            "and not at all if the graph came from vLLM's cache."
        )
    return found
