"""``vllm-fl explain``: which implementation serves an operator, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.output import console, examples, print_json, table
from vllm_fl.errors import CommandError, Exit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_OVERVIEW = ("operator", "implementation", "why", "set by", "candidates")
_CANDIDATES = ("order", "implementation", "kind", "priority", "why", "set by")
_PARAMETERS = ("implementation", "parameter", "value", "default", "allowed", "set by")


def _operators(incomplete: str) -> list[str]:
    from vllm_fl.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lines = (
        "explain rms_norm",
        "explain silu_and_mul --shape 8x4096 --dtype bf16 --device cuda",
        "explain rms_norm --shape 8x4096 --shape weight=4096",
        "explain --all",
        "explain rms_norm --live /run/user/1000/vllm-fl",
    )
    app.command(epilog=examples(*lines))(explain)


def explain(
    operator: Annotated[
        str | None, typer.Argument(metavar="OP", help="The operator.", autocompletion=_operators, show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every operator, one line each.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Of the first tensor, 8x4096; of another argument, NAME=4096."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Of the floating tensors: bf16, float32 ...")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Where the tensors are; it need not be here (default: cpu)."),
    ] = None,
    live: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Ask the running processes that VLLM_FL_TRACE_DIR=DIR has instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show the candidates of an operator, accepted or rejected, with the reason and the setting that decided.

    With a shape, a dtype or a device the question is about such calls alone. Exits with 1 if no implementation is left.
    """
    with user_errors(as_json):
        if (operator is None) == (not every):
            raise CommandError("Name one operator, or give --all.", "vllm-fl explain rms_norm", Exit.USAGE)
        details = bool(shape or dtype or device)
        if details and (every or live is not None):
            text = "--shape, --dtype and --device are for one operator of this process."
            raise CommandError(text, "Leave them out, or name an operator without --all and --live.", Exit.USAGE)
        if live is not None:
            found = _live(live, operator, as_json)
        else:
            found = _here(operator, shape or (), dtype, device, as_json)
        if not found:
            raise typer.Exit(Exit.FAILED)


def _here(operator: str | None, shape: Sequence[str], dtype: str | None, device: str | None, as_json: bool) -> bool:
    """Whether every operator asked about has an implementation."""
    from vllm_fl.diagnostics import explain as explain_one
    from vllm_fl.diagnostics import explain_all

    if operator is None:
        documents = [explanation.as_dict() for explanation in explain_all()]
    else:
        documents = [explain_one(operator, shape=shape, dtype=dtype, device=device).as_dict()]
    if as_json:
        print_json(documents if operator is None else documents[0])
    else:
        _show(documents, whole=operator is not None)
    return operator is None or documents[0]["chosen"] is not None


def _live(directory: Path, operator: str | None, as_json: bool) -> bool:
    from vllm_fl.cli.live import answers
    from vllm_fl.errors import UnknownOperatorError, did_you_mean

    processes, found = answers(directory), []
    for process in processes:
        chosen = [doc for doc in process.operators if operator in (None, doc["operator"])]
        if not chosen and not process.problem:
            names = [doc["operator"] for doc in process.operators]
            raise UnknownOperatorError(
                f"process {process.pid} has no operator {operator!r}{did_you_mean(str(operator), names)}"
            )
        found.append((process, chosen))
    if as_json:
        print_json([
            {"pid": process.pid, "rank": process.rank, "problem": process.problem, "operators": chosen}
            for process, chosen in found
        ])  # fmt: skip
    else:
        for process, chosen in found:
            console().print(
                f"Process {process.pid}, rank {process.rank}: {process.problem or 'answers'}", soft_wrap=True
            )
            _show(chosen, whole=operator is not None)
    return all(not process.problem for process in processes)


def _show(documents: Iterable[Mapping[str, Any]], whole: bool) -> None:
    out = console()
    if not whole:
        title, rows = "Which implementation serves each operator", [_line(document) for document in documents]
        out.print(table(title, _OVERVIEW, rows, right=("candidates",)))
        return
    for document in documents:
        out.print(f"{document['signature']}: {document['chosen'] or 'no implementation'}", style="bold", markup=False)
        if document["summary"]:
            out.print(
                f"{document['summary']} vLLM calls it from {document['called_from']}.", markup=False, soft_wrap=True
            )
        for name, text in document["arguments"].items():
            out.print(f"  {name}: {text}", markup=False)
        lines = [_candidate(index, candidate) for index, candidate in enumerate(document["candidates"], 1)]
        out.print(table("Candidates", _CANDIDATES, lines, right=("order", "priority")))
        parameters = [
            (c["implementation"], p["name"], p["value"], p["default"], ", ".join(p["allowed"]), p["origin"])
            for c in document["candidates"]
            for p in c.get("parameters", ())  # processes of an older release have none
        ]
        if parameters:
            out.print(table("Parameters", _PARAMETERS, parameters))


def _candidate(index: int, candidate: Mapping[str, Any]) -> list[str]:
    fields = ("implementation", "kind", "priority", "reason", "origin")
    return [str(index) if candidate["accepted"] else "-", *(str(candidate[field]) for field in fields)]


def _line(document: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    first = next(iter(document["candidates"]), None)
    reason, origin = (first["reason"], first["origin"]) if first else ("none is registered", "")
    return document["operator"], document["chosen"] or "none", reason, origin, str(len(document["candidates"]))
