"""``vllm-fl bisect``: which operators make a model's answers differ."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.models import run_model
from vllm_fl.cli.output import examples, print_json
from vllm_fl.errors import Exit


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lines = (
        "bisect quickstart --a reference --b present",
        "bisect Qwen/Qwen3-4B --a reference --b my.yaml --output-len 64 --dtype float32",
    )
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=settings, epilog=examples(*lines))(bisect)


def bisect(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `vllm serve`; `quickstart` is the small one.")],
    a: Annotated[str, typer.Option("--a", metavar="POLICY", help="The policy whose answers are right.")],
    b: Annotated[str, typer.Option("--b", metavar="POLICY", help="The policy whose answers are not.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests, given at once.")] = 2,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what vLLM prints instead of keeping it.")] = False,
) -> None:
    """Find the smallest set of operators that makes a model's answers differ, and where in the model it does.

    Further options are vLLM's. The model runs eager, in one process a rank. Exits with 1 if the answers differ.
    """
    with user_errors(as_json):
        from vllm_fl.cli.commands.compare import LOG, show_comparison
        from vllm_fl.compare import bisect_model
        from vllm_fl.engines import Workload
        from vllm_fl.policies import parse_policies

        good, bad = parse_policies(a=a, b=b)
        with (
            run_model(model, context.args, None if verbose else LOG) as running,
            running.reporter.step(f"Bisect {model}") as step,
        ):
            found = bisect_model(
                running.directory,
                good,
                bad,
                names=(a, b),
                workload=Workload(requests, input_len, output_len),
                arguments=running.arguments,
                progress=lambda text: step.update(0, text=f"Bisect {model}: {text}"),
            )
        if as_json:
            print_json(found.as_dict())
        elif not found.culprits:
            names = ", ".join(found.candidates) or "none"
            typer.echo(f"The answers are the same. Operators with different implementations: {names}.")
        else:
            if found.comparison is not None:
                show_comparison(found.comparison)
            typer.echo(f"The answers differ because of: {', '.join(found.culprits)} ({found.runs} runs).")
            if not found.others_agree:
                typer.echo("They still differ without these: take them out of --b and bisect again.")
        if found.culprits:
            raise typer.Exit(Exit.FAILED)
