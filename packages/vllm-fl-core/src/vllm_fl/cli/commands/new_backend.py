"""``vllm-fl new-backend``: a complete distribution for a chip, to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.output import examples, print_json


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("new-backend", epilog=examples("new-backend acme", "new-backend acme --device npu"))(new_backend)


def new_backend(
    name: Annotated[str, typer.Argument(help="Name of the backend and of its vendor, such as acme.")],
    device: Annotated[str, typer.Option(help="The device's name in PyTorch, such as npu.")] = "cpu",
    sdk: Annotated[
        str, typer.Option(metavar="MODULE", help="The module that registers the device (default: torch_DEVICE).")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where to write it (default: NAME-backend).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write a backend distribution that builds, passes the conformance checks and serves a model as it is.

    Its operators start as the reference's and are marked so; replace them one by one.
    """
    with user_errors(as_json):
        from vllm_fl.scaffold import NewBackend, write

        backend = NewBackend(name, device, sdk)
        target = folder or Path(backend.folder)
        paths = write(backend, target)
        commands = [
            f"pip install {target if target.is_absolute() else f'./{target}'}",
            f"pytest {target}",
            f"VLLM_FL_PLATFORM={name} vllm-fl quickstart",
        ]
        if as_json:
            document = {
                "distribution": backend.distribution,
                "folder": str(target),
                "files": [str(path) for path in paths],
                "next": commands,
            }
            print_json(document)
            return
        typer.echo(f"{backend.distribution} is in {target} ({len(paths)} files). Install it, test it, serve a model:\n")
        typer.echo("\n".join(f"    {command}" for command in commands))
