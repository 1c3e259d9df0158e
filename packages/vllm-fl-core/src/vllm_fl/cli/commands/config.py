"""``vllm-fl config``: the effective configuration, a file's mistakes, the schema for editors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.output import console, examples, print_json, table
from vllm_fl.errors import Exit

if TYPE_CHECKING:
    from vllm_fl.config import Problem, SettingRow

_PLACE = re.compile(r"(?P<file>.*):(?P<line>\d+):(?P<column>\d+)")


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    group = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)
    group.command(epilog=examples("config show", "config show --json"))(show)
    group.command(epilog=examples("config check my.yaml", "config check my.yaml --json"))(check)
    group.command(epilog=examples("config schema > vllm-fl.schema.json"))(schema)
    app.add_typer(group, name="config")


def show(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """Show every effective value with the file, line and column, or the variable, that it comes from."""
    with user_errors(as_json):
        from vllm_fl.config import get_settings
        from vllm_fl.dispatch import get_default_manager

        settings = get_settings()
        get_default_manager().ensure_initialized()  # it knows the names that the configuration may use
        rows = settings.describe()
        if as_json:
            print_json([_row(row) for row in rows])
            return
        cells = [(_key(row), _shown(row), row.origin.layer, str(row.origin)) for row in rows]
        console().print(table("Configuration", ("key", "value", "layer", "set by"), cells))


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file, as VLLM_FL_CONFIG would name it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show everything that is wrong with a file: where, the value, what is allowed and the nearest match.

    Names of operators, vendors and implementations are compared with what is installed here. Exits with 2 if anything
    is wrong.
    """
    with user_errors(as_json):
        from vllm_fl.config import check_file
        from vllm_fl.diagnostics import known_names

        problems = check_file(file, known_names())
        if as_json:
            print_json({"file": str(file), "problems": [_problem(problem) for problem in problems]})
        else:
            for problem in problems:
                typer.echo(str(problem))
            if not problems:
                typer.echo(f"{file}: nothing is wrong.")
        if problems:
            raise typer.Exit(Exit.USAGE)


def schema() -> None:
    """Print the JSON schema of a configuration file, for editors that check YAML while one types."""
    from vllm_fl.config import json_schema

    print_json(json_schema())


def _key(row: SettingRow) -> str:
    return f"{row.key}.{row.item}" if row.item is not None else row.key


def _shown(row: SettingRow) -> str:
    if row.item is not None:
        return " | ".join(row.value) if isinstance(row.value, tuple) else "listed" if row.value is True else row.value
    if row.value == ():
        return "empty"
    if row.value is None:
        return "not set"
    return str(row.value).lower() if isinstance(row.value, bool) else str(row.value)


def _row(row: SettingRow) -> dict[str, Any]:
    return {
        "key": row.key,
        "item": row.item,
        "value": row.value,
        "layer": row.origin.layer,
        "origin": str(row.origin),
    }


def _problem(problem: Problem) -> dict[str, Any]:
    match = _PLACE.fullmatch(problem.where)
    line, column = (int(match["line"]), int(match["column"])) if match else (None, None)
    return {
        "file": match["file"] if match else problem.where,
        "line": line,
        "column": column,
        "key": problem.key or None,
        "message": problem.text,
    }
