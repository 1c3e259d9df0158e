"""Without data and without Python: fake tensors, torch.compile, captured graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import Case, InputMaker
from vllm_fl.dispatch.torch_ops import OpaqueOp

from .cases import sized_case, tensors
from .comparison import canonical, difference, disagreements, listed
from .judge import Judge
from .memory import Arguments

_TOKENS = (9, 17, 33)
_REMEDY = "mark it OpImpl(opaque=True) if it cannot be traced"
_numbers = count(1)


def check_fake(judge: Judge, cases: Sequence[Case], dtype: torch.dtype) -> str:
    """Run the implementation on fake tensors; returns why not, if it was not done.

    An opaque one is not asked: graphs take the operator's own meta function.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    if judge.impl.opaque:
        return "opaque: graphs take the operator's own meta function"
    for case in cases:
        arguments = Arguments(judge.spec, case)
        if judge.link.refusal(arguments.args, arguments.kwargs) is not None:
            continue
        with _quiet(), FakeTensorMode() as mode:
            values = {
                name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in arguments.by_name.items()
            }
            fakes = listed(judge.spec.fake(**values))
            try:
                results = listed(judge.link.call(*values.values()))
            except (DataDependentOutputException, NotImplementedError):
                continue  # whether it looks at values while it is compiled, too, is seen there
            except Exception as error:  # whatever PyTorch or the implementation raises without data
                text = f"fails on fake tensors: {_first_line(error)}; {_REMEDY}"
                judge.note("fake", text, case, dtype)
                results = fakes
            for text in disagreements(fakes, results):
                judge.note("fake", f"without data {text}", case, dtype)
            judge.count("fake")
    return "it takes no case without data"


def check_compile(judge: Judge, device: str, dtype: torch.dtype, seed: int) -> str:
    """Compile the call whole and run it for several numbers of tokens; returns why not, if it was not done."""
    from torch._dynamo.utils import counters

    call = _traceable(judge)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    try:
        cases = _cases(judge, device, dtype, seed)
        dynamic = _dynamic(judge, cases)
        for case in cases:
            plain = judge.offer(case, dtype)
            if plain.results is None:
                return f"it does not take {case.name!r}: {plain.reason}"
            arguments = Arguments(judge.spec, case)
            for name, value in arguments.tensors():
                for dimension in dynamic[name]:
                    torch._dynamo.mark_dynamic(value, dimension)
            try:
                with _quiet():
                    results = listed(compiled(*arguments.args, **arguments.kwargs))
            except Exception as error:  # Dynamo, AOTAutograd and the implementation each have their own
                remedy = "" if judge.impl.opaque else f"; {_REMEDY}"
                judge.note("compile", f"{_first_line(error)}{remedy}", case, dtype)
                return ""
            judge.count("compile")
            _compare(judge, "compile", (arguments, results), (plain.arguments, plain.results), case, dtype)
        graphs = counters["stats"]["unique_graphs"]
        if graphs > 1:
            judge.note("compile", f"{graphs} graphs for {len(_TOKENS)} numbers of tokens, expected 1", case, dtype)
    finally:
        torch._dynamo.reset()
    return ""


def check_graph(judge: Judge, device: str, dtype: torch.dtype, seed: int) -> str:
    """Capture the call, replay it with other values; returns why not, if it was not done."""
    module = torch.get_device_module(torch.device(device))
    classes = [value for value in vars(module).values() if hasattr(value, "capture_begin")]
    if not hasattr(module, "graph") or not classes:
        return f"the device {torch.device(device).type} captures no graphs"
    for tokens in _TOKENS[:2]:
        first, second = (
            sized_case(judge.spec, InputMaker(dtype, device, number), tokens) for number in (seed, seed + 1)
        )
        if not tensors(judge.spec, first):
            return "no tensors"
        plain = judge.offer(second, dtype)
        if plain.results is None:
            return f"it does not take {second.name!r}: {plain.reason}"
        arguments = Arguments(judge.spec, first)
        try:
            results = _captured(module, classes[0], judge.link.call, arguments, second)
        except Exception as error:  # the device's runtime has its own
            judge.note("graph", f"not captured: {_first_line(error)}", second, dtype)
            return ""
        judge.count("graph")
        _compare(judge, "graph", (arguments, results), (plain.arguments, plain.results), second, dtype)
    return ""


def _captured(
    module: Any, graph_class: Any, call: Callable[..., Any], arguments: Arguments, other: Case
) -> tuple[Any, ...]:
    """What a graph captured with `arguments` gives for the values of `other`, which are copied into them."""
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        call(*arguments.args, **arguments.kwargs)
        call(*arguments.args, **arguments.kwargs)
    module.current_stream().wait_stream(stream)
    graph = graph_class()
    with module.graph(graph):
        results = listed(call(*arguments.args, **arguments.kwargs))
    values = tensors(arguments.spec, other)
    for name, value in arguments.tensors():
        value.copy_(values[name])
    graph.replay()
    module.synchronize()
    return results


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs a traceback of every meta function that fails; the failure is reported here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _cases(judge: Judge, device: str, dtype: torch.dtype, seed: int) -> list[Case]:
    numbers = _TOKENS if judge.spec.sized else _TOKENS[:1]
    return [sized_case(judge.spec, InputMaker(dtype, device, seed), tokens) for tokens in numbers]


def _dynamic(judge: Judge, cases: Sequence[Case]) -> dict[str, list[int]]:
    """The dimensions of each tensor that change with the number of tokens."""
    first, *others = (tensors(judge.spec, case) for case in cases)
    return {
        name: [i for i, size in enumerate(value.shape) if any(other[name].shape[i] != size for other in others)]
        for name, value in first.items()
    }


def _traceable(judge: Judge) -> Callable[..., Any]:
    """The implementation as a compiled model calls it: an opaque one behind a custom operator."""
    if not judge.impl.opaque:
        return judge.link.call
    name = f"{judge.spec.name}_conformance_{next(_numbers)}"
    return OpaqueOp(judge.spec, name, lambda: judge.link.call).make_call()


def _compare(
    judge: Judge,
    check: str,
    got: tuple[Arguments, tuple[Any, ...]],
    want: tuple[Arguments, tuple[Any, ...]],
    case: Case,
    dtype: torch.dtype,
) -> None:
    results, expected = (canonical(judge.spec, a.by_name, values) for a, values in (got, want))
    pairs = [(f"result {i}", *pair) for i, pair in enumerate(zip(results, expected, strict=False))]
    for name in judge.spec.mutates:
        if isinstance(got[0].by_name.get(name), Tensor):
            pairs.append((f"argument {name!r}", got[0].by_name[name], want[0].by_name[name]))
    for what, value, wanted in pairs:
        text = isinstance(value, Tensor) and difference(value, wanted, judge.tolerance(value.dtype, dtype))
        if text:
            judge.note(check, f"{what} {text} without it", case, dtype)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    with suppress(IndexError):
        return f"{type(error).__name__}: {lines[0][:240]}"
    return type(error).__name__
