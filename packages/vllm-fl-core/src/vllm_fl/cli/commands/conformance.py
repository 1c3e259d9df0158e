"""``vllm-fl conformance``: does a backend do what the catalogue says?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.output import console, examples, print_json
from vllm_fl.errors import CommandError, Exit


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lines = (
        "conformance acme",
        "conformance acme --device npu --op rms_norm --tokens 1,256,16384",
        "conformance acme --allow known.yaml --junit conformance.xml",
    )
    app.command(epilog=examples(*lines))(conformance)


def _operators(incomplete: str) -> list[str]:
    from vllm_fl.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def _checks(incomplete: str) -> list[str]:
    from vllm_fl.testing import CHECKS, PLATFORM_CHECKS

    return [name for name in (*CHECKS, *PLATFORM_CHECKS) if name.startswith(incomplete)]


def conformance(
    dist: Annotated[
        str | None,
        typer.Argument(metavar="[DIST]", help="A distribution or backend (default: all that are installed)."),
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device that the operators run on.")] = "cpu",
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            metavar="OP",
            help="Only this operator; may be given more than once.",
            autocompletion=_operators,
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be given more than once.")] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(help="Only this check; may be given more than once.", autocompletion=_checks),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of tokens, beside the catalogue's shapes.")
    ] = "1,33",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    allow: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Known gaps (default: conformance.yaml in the distribution's package)."),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML there, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check every operator that a backend registers, and its platform.

    Results are compared with those of the reference distribution in float64. The last line is a badge for a README.
    """
    with user_errors(as_json):
        from vllm_fl.progress import Reporter
        from vllm_fl.testing import AllowList, Options, find_bundles, run
        from vllm_fl.testing.rendering import badge, show, write_junit

        options = Options(device, tuple(op or ()), tuple(dtype or ()), _numbers(tokens), tuple(check or ()), seed)
        bundles = find_bundles(dist)
        for bundle in bundles:
            bundle.prepare()
        _require_device(device)
        gaps = AllowList.read(allow) if allow is not None else None
        reporter = Reporter(silent=as_json)
        with reporter.step("Check conformance") as step:
            total = sum(len(bundle.implementations) for bundle in bundles)
            done = iter(range(total + len(bundles)))
            report = run(bundles, options, gaps, lambda text: step.update(next(done, 0), total, text))
        if junit is not None:
            write_junit(report, junit)
        if as_json:
            print_json({**report.as_dict(), "badge": badge(report)})
        else:
            show(report, console())
        if not report.ok:
            raise typer.Exit(Exit.INTERRUPTED if report.left else Exit.FAILED)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = next((part for part in parts if not part.isdecimal()), None)
    if wrong is not None:
        raise CommandError(
            f"--tokens {text!r}: {wrong!r} is not a number.", "Give numbers such as 1,33,4096.", Exit.USAGE
        )
    return tuple(int(part) for part in parts)


def _require_device(device: str) -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise CommandError("The package torch is not installed.", "Install torch for your device.", Exit.MISSING)
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a device that this PyTorch does not know, or does not find
        first = str(error).strip().splitlines()[0]
        raise CommandError(
            f"--device {device!r} cannot be used: {first}",
            "Name a device of this machine, such as cpu; a vendor's device may need its PyTorch extension installed.",
            Exit.MISSING,
        ) from None
