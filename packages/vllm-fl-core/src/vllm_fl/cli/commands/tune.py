"""``vllm-fl tune``: the mix of implementations with which a model is fastest."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.models import run_model
from vllm_fl.cli.output import console, examples, print_json, table
from vllm_fl.errors import CommandError, Exit, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_fl.progress import Step
    from vllm_fl.tune import Options, Progress, TuneReport

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lines = (
        "tune Qwen/Qwen3-4B --budget 20m",
        "tune Qwen/Qwen3-4B --requests 64 --input-len 512 --output-len 64 --objective tpot",
        "tune Qwen/Qwen3-4B --resume --budget 1h",
    )
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=settings, epilog=examples(*lines))(tune)


def tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `vllm serve`; `quickstart` is the small one.")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="POLICY", help="The baseline: present, a kind, op=token|token;..., or a file."
        ),
    ] = "present",
    requests: Annotated[int, typer.Option(min=1, help="Requests, given at once.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long: 90s, 20m, 1h.")] = "20m",
    trials: Annotated[int | None, typer.Option(min=1, help="How many trials at most.")] = None,
    objective: Annotated[str, typer.Option(help="throughput, ttft, tpot or goodput.")] = "throughput",
    ttft: Annotated[float, typer.Option(help="Goodput: seconds to the first token at most.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Goodput: seconds of each further token at most.")] = 0.1,
    sampler: Annotated[str, typer.Option(help="greedy, tpe, gp, or auto: greedy, then tpe.")] = "auto",
    confidence: Annotated[float, typer.Option(min=0.5, max=0.9999, help="How sure to be of a gain.")] = 0.95,
    max_logprob_diff: Annotated[
        float, typer.Option(help="Accuracy: mean difference of log-probabilities at most.")
    ] = 0.1,
    tie: Annotated[float, typer.Option(help="Accuracy: tokens may change places within this difference.")] = 0.5,
    hang_after: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="What takes longer is a hang; default by what the engine has shown."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="Optuna storage; default a SQLite file in --out.")
    ] = None,
    study: Annotated[str, typer.Option(help="Name of the study in the storage.")] = "vllm-fl tune",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study if there is one.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")] = Path("vllm-fl-tune"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what vLLM prints instead of keeping it.")] = False,
) -> None:
    """Search for the mix of implementations that serves a workload best, and write it as a policy file.

    Further options are vLLM's. Ctrl-C ends with the best so far. Writes policy.yaml for VLLM_FL_CONFIG, tune.json,
    tune.html and the study to --out, and an entry for VLLM_FL_TUNED=auto.
    """
    with user_errors(as_json):
        from vllm_fl.engines import Workload
        from vllm_fl.tune import OBJECTIVES, SAMPLERS, Budget, Limits, Options, Rule, Tolerance
        from vllm_fl.tune.tuner import require_optuna

        require_optuna()
        options = Options(
            objective=_one_of(objective, OBJECTIVES, "--objective"),
            limits=Limits(ttft, tpot),
            sampler=_one_of(sampler, SAMPLERS, "--sampler"),
            budget=Budget(_seconds(budget), trials),
            rule=Rule(confidence=confidence),
            tolerance=Tolerance(max_logprob_diff, tie),
            storage=storage or f"sqlite:///{out.resolve() / 'study.db'}",
            name=study,
            resume=resume,
            hang_s=hang_after,
        )
        if objective == "tpot" and output_len < 2:
            raise CommandError("--objective tpot: an answer of one token has no further ones.", code=Exit.USAGE)
        out.mkdir(parents=True, exist_ok=True)
        work = Workload(requests, input_len, output_len)
        report = _run(model, policy, work, options, out, context.args, verbose)
        paths = _write(report, out)
        if as_json:
            print_json({**report.as_dict(), "files": paths})
            return
        _show(report)
        typer.echo("".join(f"{name}: {path}\n" for name, path in paths.items()), nl=False)


def _run(
    model: str, policy: str, work: Any, options: Options, out: Path, extra: Sequence[str], verbose: bool
) -> TuneReport:
    from vllm_fl.policies import parse_policy
    from vllm_fl.tune import tune_model

    chosen = parse_policy(policy, "--policy")
    with (
        run_model(model, extra, None if verbose else out / "vllm.log") as running,
        running.reporter.step(f"Tune {model}") as step,
    ):
        return tune_model(
            running.directory,
            policy=chosen,
            workload=work,
            arguments=running.arguments,
            options=options,
            on_progress=_shown_in(step),
        )


def _shown_in(step: Step) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        best = math.exp(progress.history.best_total)
        text = f"Tune: {len(progress.history.trials)} trials, best x{best:.3f}"
        left = progress.left
        if left is not None:
            text += f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
        step.update(progress.seconds, None if left is None else progress.seconds + left, text)

    return show


def _write(report: TuneReport, out: Path) -> dict[str, str]:
    from vllm_fl.tune import store

    (out / "policy.yaml").write_text(report.policy_file(), encoding="utf-8")
    (out / "tune.json").write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
    (out / "tune.html").write_text(report.page(), encoding="utf-8")
    paths = {"Policy": str(out / "policy.yaml"), "Page": str(out / "tune.html"), "Data": str(out / "tune.json")}
    if report.ratio is not None and report.changed:
        paths["Table"] = str(store(report.entry()))
    return paths


def _show(report: TuneReport) -> None:
    from vllm_fl.tune.report import describe, text_of

    printer = console()
    rows = [
        (
            operator.name,
            f"{operator.share:.1%}",
            operator.implementations[0],
            report.changed.get(operator.name, ""),
            f"{report.importances[operator.name]:.2f}" if operator.name in report.importances else "",
        )
        for operator in report.space.operators
    ]
    columns = ("operator", "share", "baseline", "tuned", "importance")
    printer.print(table(f"Tuned for {report.objective}", columns, rows, right=("share", "importance")))
    failed = [trial for trial in report.found.history.trials if trial.outcome == "failed"]
    if failed:
        lost = [(str(trial.number), text_of(trial.changed), describe(trial)) for trial in failed]
        printer.print(table("Cannot be used", ("trial", "change", "reason"), lost))
    count, interval = len(report.found.history.trials), report.ratio
    printer.print(f"{report.workload}: {count} trials in {report.found.seconds:.0f} s, ended by: {report.found.stop}.")
    if interval is not None:
        ends = f"{interval.low:.3f} to {interval.high:.3f} at {report.confidence:.0%}"
        printer.print(f"Ratio to the baseline: {interval.ratio:.3f} ({ends}).")
    elif not report.changed:
        printer.print("No mix is certainly better than the baseline.")
    for remark in report.remarks:
        printer.print(remark)


def _one_of(value: str, options: Sequence[Any], option: str) -> Any:
    if value not in options:
        text = f"{option}: {value!r} is not one of {', '.join(options)}{did_you_mean(value, options)}"
        raise CommandError(text, code=Exit.USAGE)
    return value


def _seconds(text: str) -> float:
    """The seconds of ``90s``, ``20m``, ``1.5h`` or a plain number of them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0.0:
        raise CommandError(f"--budget: {text!r} is not a time.", "Write 90s, 20m or 1h.", Exit.USAGE)
    return float(match[1]) * _UNITS[match[2]]
