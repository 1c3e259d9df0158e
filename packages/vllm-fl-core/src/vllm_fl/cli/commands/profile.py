"""``vllm-fl profile``: which operator and which implementation take the time of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.models import run_model
from vllm_fl.cli.output import console, examples, print_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from vllm_fl.profile import ProfileReport


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lines = (
        "profile quickstart",
        "profile Qwen/Qwen3-4B --requests 256 --input-len 512 --output-len 128 --tensor-parallel-size 2",
        "profile quickstart --against silu_and_mul=reference",
        "profile quickstart --policy vendor --against my.yaml --out comparison --enforce-eager",
    )
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=settings, epilog=examples(*lines))(profile)


def profile(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `vllm serve`; `quickstart` is the small one.")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="POLICY", help="What to select by: present, a kind, op=token|token;..., or a file."
        ),
    ] = "present",
    against: Annotated[
        str | None, typer.Option(metavar="POLICY", help="A second policy, whose run is put beside the first.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests, given at once.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the page and the timelines.")] = Path(
        "vllm-fl-profile"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what vLLM prints instead of keeping it.")] = False,
) -> None:
    """Run a model under the profiler and show the share of each operator and implementation.

    Further options are vLLM's. Writes profile.html, profile.json and a timeline a rank to --out. The shares are of the
    device's time; without a device, of the time of the workers' threads.
    """
    with user_errors(as_json):
        from vllm_fl.engines import Workload

        work = Workload(requests, input_len, output_len)
        names = {"--policy": policy} if against is None else {"--policy": policy, "--against": against}
        reports = _run(model, names, work, out, context.args, verbose)
        document = [report.as_dict() for report in reports]
        (out / "profile.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
        from vllm_fl.profile.page import page

        path = out / "profile.html"
        path.write_text(page(reports), encoding="utf-8")
        if as_json:
            print_json({"reports": document, "page": str(path)})
            return
        _show(reports)
        traces = ", ".join(trace for report in reports for trace in report.traces)
        typer.echo(f"Page: {path}\nTimelines, for ui.perfetto.dev: {traces}")


def _run(
    model: str, names: dict[str, str], work: Any, out: Path, extra: Sequence[str], verbose: bool
) -> list[ProfileReport]:
    from vllm_fl.policies import parse_policy
    from vllm_fl.profile import profile_model

    policies = {option: parse_policy(text, option) for option, text in names.items()}
    reports = []
    with run_model(model, extra, None if verbose else out / "vllm.log") as running:
        for option, chosen in policies.items():
            with running.reporter.step(f"Profile {model} with policy {names[option]}"):
                report = profile_model(
                    running.directory,
                    policy=chosen,
                    policy_name=names[option],
                    workload=work,
                    arguments=running.arguments,
                    directory=out if len(policies) == 1 else out / option.strip("-"),
                )
            reports.append(report)
    return reports


def _show(reports: Sequence[ProfileReport]) -> None:
    out = console()
    for report in reports:
        out.print(_shares(report))
        out.print(f"{report.workload}: {report.wall_s:.2f} s under the profiler, {report.output_tokens} tokens out.")
        if report.coverage is not None:
            found = report.coverage
            rows = [
                (s.key[0], f"{s.calls:,}", f"{s.time_us / 1000:.2f}", f"{s.share:.1%}") for s in found.by_provider()
            ]
            numbers = ("launches", "ms", "share")
            out.print(table("Kernels by provider", ("provider", *numbers), rows, right=numbers))
            text = f"Triton: {found.triton_share:.1%} of the device's time, {found.triton_share_outside_products:.1%} "
            out.print(f"{text}without matrix products ({found.product_share:.1%}), copies and communication.")
    if len(reports) == 2:
        out.print(_pairs(*reports))


def _shares(report: ProfileReport) -> Table:
    from vllm_fl.profile.page import folded

    rows = [
        (r.operator, r.implementation, r.provider, f"{r.calls:,}", f"{r.time_us / 1000:.2f}", f"{r.share:.1%}")
        for r in folded(report.rows)
    ]
    columns = ("operator", "implementation", "provider", "calls", "ms", "share")
    clock = "the device" if report.clock == "device" else "the workers' threads"
    return table(f"Time of {clock}, policy {report.policy}", columns, rows, right=("calls", "ms", "share"))


def _pairs(first: ProfileReport, second: ProfileReport) -> Table:
    from vllm_fl.profile import side_by_side
    from vllm_fl.profile.page import SMALL

    rows = []
    for pair in side_by_side(first, second):
        if max(pair.shares) >= SMALL:
            (a, b), (before, after) = pair.implementations, pair.times_us
            ratio = f"{after / before:.2f}" if before else ""
            rows.append((pair.name, a, f"{before / 1000:.2f}", b, f"{after / 1000:.2f}", ratio))
    columns = ("part", first.policy, "ms", f"against {second.policy}", "ms ", "second / first")
    return table("Side by side", columns, rows, right=("ms", "ms ", "second / first"))
