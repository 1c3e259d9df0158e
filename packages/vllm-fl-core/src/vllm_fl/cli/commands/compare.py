"""``vllm-fl compare``: numbers of one implementation against another, alone or inside a running model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_fl.cli.exits import user_errors
from vllm_fl.cli.models import run_model
from vllm_fl.cli.output import console, examples, print_json, table
from vllm_fl.errors import CommandError, Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_fl.compare import Comparison, Filters, OperatorResult

#: Where the output of vLLM goes.
LOG = Path("vllm-fl-compare.log")


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lines = (
        "compare rms_norm",
        "compare silu_and_mul --dtype bf16 --device cuda --tokens 4096",
        "compare quickstart --a reference --b present",
        "compare Qwen/Qwen3-4B --a reference --b my.yaml --layers 0-3 --steps 1-8 --dump inputs",
        "compare --replay inputs/rms_norm-reference.torch-vendor.acme-step7-rank0.pt",
    )
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=settings, epilog=examples(*lines))(compare)


def compare(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="OP|MODEL", help="An operator, or a model as for `vllm serve`.", show_default=False),
    ] = None,
    a: Annotated[str | None, typer.Option("--a", metavar="POLICY", help="For a model: what its run goes by.")] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="POLICY", help="For a model: the other one.")] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run every implementation on the inputs that --dump kept.")
    ] = None,
    operators: Annotated[str | None, typer.Option(metavar="OPS", help="Only these, separated by commas.")] = None,
    layers: Annotated[str | None, typer.Option(metavar="N", help="Only these decoder layers: 3 or 0-3,7.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Only these forwards, counted from 1.")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N", help="Only these ranks.")] = None,
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the inputs of each operator's first difference there.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="For a model: requests, given at once.")] = 2,
    input_len: Annotated[int, typer.Option(min=1, help="For a model: tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="For a model: tokens of each answer.")] = 16,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="DTYPE", help="bf16, fp32 and the like; may be repeated for an operator."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="For an operator and --replay.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="For an operator: size of the timed input.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what vLLM prints instead of keeping it.")] = False,
) -> None:
    """Compare the implementations of an operator, or two policies inside a running model.

    An operator's implementations run on the catalogue's inputs, against float64. In a model each call is computed by
    both policies on the same inputs; then whole runs are compared by layer and by token. A model runs eager, in one
    process a rank. Exits with 1 if anything is outside of the tolerance, or if there was nothing to compare.
    """
    with user_errors(as_json):
        if replay is not None:
            if target is not None or context.args:
                given = target or context.args[0]
                raise CommandError(f"--replay takes --device and --json alone, not {given}.", code=Exit.USAGE)
            differs = _replay(replay, device, as_json)
        elif target is None:
            raise CommandError("Name an operator or a model.", "vllm-fl compare rms_norm", Exit.USAGE)
        elif a is None and b is None and _is_operator(target):
            differs = _operator(target, dtype or (), device, tokens, as_json, context.args)
        else:
            from vllm_fl.engines import Workload

            work = Workload(requests, input_len, output_len)
            filters = _filters(operators, layers, steps, ranks)
            extra = [*context.args, *(part for name in dtype or () for part in ("--dtype", _long(name)))]
            found = _model(target, (a, b), work, filters, dump, extra, verbose)
            differs = found.differs or found.is_empty
            if as_json:
                print_json(found.as_dict())
            else:
                show_comparison(found)
        if differs:
            raise typer.Exit(Exit.FAILED)


def _long(dtype: str) -> str:
    """The dtype's name as vLLM knows it."""
    from vllm_fl.diagnostics.arguments import parse_dtype
    from vllm_fl.dispatch.types import dtype_name

    return dtype_name(parse_dtype(dtype))


def _is_operator(target: str) -> bool:
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.errors import UnknownOperatorError, did_you_mean

    manager = get_default_manager()
    manager.ensure_initialized()
    known = manager.registry.known_operators()
    if target in known:
        return True
    hint = did_you_mean(target, known)
    if hint and not Path(target).exists():
        raise UnknownOperatorError(f"there is no operator {target!r}{hint} A model needs --a and --b")
    return False


def _operator(name: str, dtypes: Sequence[str], device: str, tokens: int, as_json: bool, extra: Sequence[str]) -> bool:
    if extra:
        raise CommandError(f"No such option: {extra[0]}.", "vLLM's options are for models.", Exit.USAGE)
    from vllm_fl.compare import compare_operator
    from vllm_fl.diagnostics.arguments import parse_dtype
    from vllm_fl.progress import Reporter

    with Reporter(silent=as_json).step(f"Compare {name}") as step:
        results = compare_operator(
            name,
            dtypes=[parse_dtype(text) for text in dtypes],
            device=device,
            tokens=tokens,
            progress=lambda text: step.update(0, text=f"Compare {name}: {text}"),
        )
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        columns = ("implementation", "dtype", "inputs", "outside", "max error", "max ulp", "at", "time")
        title = f"{name} against float64; outside: inputs with an entry outside of the tolerance"
        console().print(table(title, columns, [_result(r) for r in results], right=columns[2:6] + columns[7:]))
    return any(result.outside or result.failed for result in results)


def _result(result: OperatorResult) -> tuple[str, ...]:
    worst = result.worst
    inputs = f"{result.cases}{f' ({result.refused} refused)' if result.refused else ''}"
    numbers = (f"{worst.max_abs:.3g}", f"{worst.max_ulp:.3g}") if worst is not None else ("", "")
    time = f"{result.time_us:,.1f} us ({result.timed_case})" if result.time_us is not None else "-"
    where = f"raised {result.failed}" if result.failed else result.worst_case
    return result.implementation, result.dtype, inputs, str(result.outside), *numbers, where, time


def _replay(file: Path, device: str, as_json: bool) -> bool:
    from vllm_fl.compare import load_dump, replay

    try:
        dump = load_dump(file)
    except FileNotFoundError:
        raise CommandError(f"There is no file {file}.", "Name one that --dump has written.", Exit.MISSING) from None
    results = replay(dump, device=device)
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        place = f"step {dump.step}, {dump.module or 'outside of the model'}, rank {dump.rank}"
        rows = [
            (r.implementation, r.failed or "; ".join(str(difference) for difference in r.differences)) for r in results
        ]
        title = f"{dump.operator} on the inputs of {place}, against {results[0].implementation}"
        console().print(table(title, ("implementation", "difference"), rows))
    return not all(result.within for result in results)


def _filters(operators: str | None, layers: str | None, steps: str | None, ranks: str | None) -> Filters:
    from vllm_fl.compare import Filters, parse_numbers
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.errors import did_you_mean

    names = None
    if operators is not None:
        names = frozenset(name.strip() for name in operators.split(","))
        manager = get_default_manager()
        manager.ensure_initialized()
        known = manager.registry.known_operators()
        for name in sorted(names - set(known)):
            raise CommandError(f"--operators: unknown operator {name!r}{did_you_mean(name, known)}", code=Exit.USAGE)
    numbers = {}
    for option, text in (("layers", layers), ("steps", steps), ("ranks", ranks)):
        try:
            numbers[option] = None if text is None else parse_numbers(text)
        except ValueError as error:
            raise CommandError(f"--{option}: {error}.", code=Exit.USAGE) from None
    return Filters(names, **numbers)


def _model(
    model: str,
    policies: tuple[str | None, str | None],
    work: Any,
    filters: Filters,
    dump: Path | None,
    extra: Sequence[str],
    verbose: bool,
) -> Comparison:
    from vllm_fl.compare import compare_model
    from vllm_fl.policies import parse_policies

    first, second = policies
    if first is None or second is None:
        raise CommandError("A model is compared under two policies.", "Give both --a and --b.", Exit.USAGE)
    one, other = parse_policies(a=first, b=second)
    with (
        run_model(model, extra, None if verbose else LOG) as running,
        running.reporter.step(f"Compare {first} with {second} in {model}"),
    ):
        return compare_model(
            running.directory,
            one,
            other,
            names=(first, second),
            workload=work,
            arguments=running.arguments,
            filters=filters,
            dumps=dump,
        )


def show_comparison(found: Comparison) -> None:
    """Prints the verdict and the tables of a comparison."""
    out = console()
    rows = [
        (
            o.operator,
            o.first,
            o.second,
            str(o.rank),
            str(o.calls),
            str(o.outside),
            f"{o.max_abs:.3g}",
            f"{o.max_ulp:.3g}",
        )
        for o in found.operators
    ]
    numbers = ("rank", "calls", "outside", "max error", "max ulp")
    heads = ("operator", f"a: {found.first}", f"b: {found.second}", *numbers)
    out.print(table("Operators on the same inputs", heads, rows, right=numbers))
    layers = [(str(x.step), x.module, f"{x.max_abs:.3g}", f"{x.outside} of {x.entries}") for x in found.layers]
    if layers:
        title = "Layers of a whole run by b against one by a"
        columns = ("step", "layer", "max error", "entries outside")
        out.print(table(title, columns, layers, right=("step", "max error")))
    for line in verdict(found):
        out.print(line, markup=False, soft_wrap=True)


def verdict(found: Comparison) -> list[str]:
    """What the comparison says, in sentences."""
    lines = []
    if found.at_start is not None:
        first, second = found.at_start
        lines.append(f"Attention is {first} under a and {second} under b: it is compared by layers and tokens alone.")
    if not found.all_layers:
        lines.append("Outputs of layers are more than a rank keeps: the last steps are compared by tokens alone.")
    for operator in found.operators:
        if operator.failed:
            lines.append(f"{operator.operator}: {operator.second} failed: {operator.failed}")
    culprit = found.culprit
    if culprit is not None and culprit.step is not None:
        where = f"step {culprit.step}, {culprit.module or 'outside of the model'}, rank {culprit.rank}"
        lines.append(f"First difference: {culprit.operator} ({culprit.second}) at {where}: {culprit.text}.")
        if culprit.dump:
            lines.append(f"Its inputs: vllm-fl compare --replay {shlex.quote(culprit.dump)}")
    for token in found.tokens:
        text = f"Request {token.request} parts at token {token.position}: {token.first} by a, {token.second} by b."
        lines.append(text)
    if found.is_empty:
        lines.append(
            "No call was compared: the policies choose the same implementations of everything that was called"
            " (`vllm-fl explain OPERATOR` shows why), or the filters leave nothing."
        )
    elif not found.differs:
        lines.append(f"No difference in {found.steps} steps: every operator is within its tolerance, all tokens agree.")
    return lines
