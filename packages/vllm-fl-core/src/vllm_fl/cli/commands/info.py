"""``vllm-fl info``: what is installed, which platform and why, what cannot work and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.output import console, examples, print_json, table
from vllm_fl.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from vllm_fl.diagnostics import Info, LiveProcess

_STATES = {"ok": "yes", "note": "note", "problem": "PROBLEM"}


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command(epilog=examples("info", "info --json", "info --live /run/user/1000/vllm-fl"))(info)


def info(
    live: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Show the failures of the running processes that VLLM_FL_TRACE_DIR=DIR has."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show versions, the platform, plug-ins, what fits together, and failed implementations.

    Exits with 1 if something that is configured cannot work; the checks say what and how to mend it.
    """
    with user_errors(as_json):
        if live is not None:
            _live(live, as_json)
            return
        from vllm_fl.diagnostics import collect_info
        from vllm_fl.progress import Reporter

        with Reporter(silent=as_json).step("Look at what is installed"):
            found = collect_info()
        if as_json:
            print_json(found.as_dict())
        else:
            _show(found, console())
        if not found.ok:
            raise typer.Exit(Exit.FAILED)


def _show(found: Info, out: Console) -> None:
    out.print(table("Versions", ("distribution", "version"), found.versions.items()))
    out.print(f"Platform: {found.platform.name or 'left to vLLM'} ({found.platform.reason})", soft_wrap=True)
    for name, reason in found.platform.rejected:
        out.print(f"  not {name}: {reason}", soft_wrap=True)
    out.print()
    rows = [(p.name, p.source, p.distribution, str(p.implementations), p.error or "registered") for p in found.plug_ins]
    columns = ("name", "found as", "distribution", "implementations", "state")
    out.print(table("Plug-ins", columns, rows, right=("implementations",)))
    checks = [(check.subject, _STATES[check.state], check.text) for check in found.checks]
    out.print(table("What fits together", ("subject", "works", "why, and what to do"), checks))
    served = ", ".join(f"{count} by {impl_id}" for impl_id, count in sorted(found.operators.items()))
    out.print(f"Operators: {served or 'none'}; `vllm-fl explain --all` says why.", soft_wrap=True)
    failures = [(f.op, f.impl_id, f.exception, f.outcome, f.traceback) for f in found.failures]
    _show_failures(failures, "this process", out)


def _live(directory: Path, as_json: bool) -> None:
    from vllm_fl.cli.live import answers

    processes = answers(directory)
    if as_json:
        print_json([
            {"pid": p.pid, "rank": p.rank, "problem": p.problem, "frozen": p.frozen, "failures": list(p.failures)}
            for p in processes
        ])  # fmt: skip
        return
    out = console()
    for process in processes:
        out.print(_headline(process), soft_wrap=True)
        _show_failures(list(_failures(process)), f"process {process.pid}", out)


def _headline(process: LiveProcess) -> str:
    state = process.problem or (f"selection frozen: {process.frozen}" if process.frozen else "selection may change")
    return f"Process {process.pid}, rank {process.rank}: {state}"


def _failures(process: LiveProcess) -> Iterator[tuple[str, str, str, str, str]]:
    for record in process.failures:
        yield record["op"], record["impl_id"], record["exception"], record["outcome"], record["traceback"]


def _show_failures(failures: Sequence[tuple[str, str, str, str, str]], where: str, out: Console) -> None:
    if not failures:
        out.print(f"No implementation has failed in {where}.")
    for op_name, impl_id, exception, outcome, trace in failures:
        out.print(f"Failed in {where}: {op_name} by {impl_id}: {exception}; {outcome}", soft_wrap=True, markup=False)
        out.print(trace, markup=False)
