"""The functions that bound operators call: generated, with the operator's own signature.

A wrapper of ``*args, **kwargs`` costs two to five times the call that it wraps; one that has the parameters by name
costs a frame. Python itself then checks the arguments, and its TypeError shows the operator's signature, which is the
function's qualified name. The code is compiled as ``<string>``, the one file name that vLLM's compile cache skips.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from vllm_fl.catalog import OpSpec

from .conditions import conditions
from .links import Call, LeftOut, Link
from .tracing import fast_is_compiling

if TYPE_CHECKING:
    from .plan import OpPlan

_SIMPLE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class _Again:
    """What ``recover`` returns to have the exception raised again."""

    def __repr__(self) -> str:
        return "AGAIN"


AGAIN = _Again()


def make_call(plan: OpPlan) -> Call:
    """The function to bind for `plan`.

    Three forms: *plain*, the chosen implementation takes whatever comes; *quick*, one test of dtype and defaults goes
    before it; *remembering*, the decision is looked up by the conditions of the call.
    """
    spec, first = plan.spec, plan.links[0]
    if spec is None or any(p.kind not in _SIMPLE for p in spec.signature.parameters.values()):
        return _generic(plan)
    remembering = plan.remembering or first.impl.supports is not None
    source = _source(spec, first, remembering, quick=first.conditional, dual=plan.traces_otherwise)
    call: Call = _factory(source)(
        fn=first.fn,
        plan=plan,
        dtypes=first.dtypes,
        key=conditions,
        compiling=fast_is_compiling(),
        defaults={name: p.default for name, p in spec.signature.parameters.items()},
        again=AGAIN,
    )
    call.__qualname__ = f"{spec}: call"
    return call


@cache
def _factory(source: str) -> Callable[..., Call]:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<string>", "exec"), namespace)
    make: Callable[..., Call] = namespace["make"]
    return make


def _source(spec: OpSpec, first: Link, remembering: bool, *, quick: bool, dual: bool) -> str:
    names = _Names(spec, first.left_out)
    body = []
    if dual:
        body += ["if _compiling():", f"    return _traced({names.forward})"]
    if remembering:
        body += [
            f"_args = {names.args}",
            f"_link = _memory.get(_key(_args, {names.kwargs}))",
            "if _link is None:",
            f"    return _attempt(_args, {names.kwargs})",
            *_guarded(f"_link.call(*_args{names.by_keyword})", f"_args, {names.kwargs}, _link"),
        ]
    else:
        if quick:
            body += [
                "try:",
                f"    _fits = {_fits(spec, first)}",
                "except AttributeError:",
                "    _fits = False",
                "if not _fits:",
                f"    return _attempt({names.args}, {names.kwargs})",
            ]
        body += _guarded(f"_fn({names.taken})", f"{names.args}, {names.kwargs}")
    lines = [
        "def make(*, fn, plan, dtypes, key, compiling, defaults, again):",
        "    _fn, _dtypes, _key, _compiling, _again = fn, dtypes, key, compiling, again",
        "    _memory, _attempt, _recover, _traced = plan.memory, plan.attempt, plan.recover, plan.traced",
        *(f"    _default_{name} = defaults[{name!r}]" for name in names.optional),
        f"    def {spec.name}({names.parameters}):",
        *(f"        {line}" for line in body),
        f"    return {spec.name}",
    ]
    return "\n".join(lines)


def _guarded(call: str, recovery: str) -> list[str]:
    return [
        "try:",
        f"    return {call}",
        "except Exception as _error:",
        f"    _answer = _recover(_error, {recovery})",
        "    if _answer is _again:",
        "        raise",
        "    return _answer",
    ]


def _fits(spec: OpSpec, first: Link) -> str:
    tests = []
    if first.dtypes is not None and first.tensor_index is not None:
        tests.append(f"{list(spec.signature.parameters)[first.tensor_index]}.dtype in _dtypes")
    elif first.dtypes is not None:
        return "False"
    for parameter in first.left_out:
        test = f"{parameter.name} is _default_{parameter.name}"
        if isinstance(parameter.default, (int, float, str)) and not isinstance(parameter.default, bool):
            test = f"({test} or {parameter.name} == _default_{parameter.name})"
        tests.append(test)
    return " and ".join(tests)


class _Names:
    """Pieces of source made of the parameters' names."""

    def __init__(self, spec: OpSpec, left_out: tuple[LeftOut, ...]) -> None:
        parameters = list(spec.signature.parameters.values())
        position = [p.name for p in parameters if p.kind is not Parameter.KEYWORD_ONLY]
        keyword = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        out = {p.name for p in left_out}
        self.optional = [p.name for p in parameters if p.default is not p.empty]
        self.parameters = _parameters(parameters)
        self.args = f"({', '.join(position)}{',' if position else ''})"
        self.kwargs = f"{{{', '.join(f'{name!r}: {name}' for name in keyword)}}}"
        self.by_keyword = "".join(f", {name}={name}" for name in keyword)
        self.forward = ", ".join([*position, *(f"{name}={name}" for name in keyword)])
        self.taken = ", ".join([*(n for n in position if n not in out), *(f"{n}={n}" for n in keyword if n not in out)])


def _parameters(parameters: list[Parameter]) -> str:
    parts: list[str] = []
    for index, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and (index == 0 or parameters[index - 1].kind is not p.KEYWORD_ONLY):
            parts.append("*")
        parts.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
        after = parameters[index + 1].kind if index + 1 < len(parameters) else None
        if p.kind is p.POSITIONAL_ONLY and after is not p.POSITIONAL_ONLY:
            parts.append("/")
    return ", ".join(parts)


def _generic(plan: OpPlan) -> Call:
    """The same without a known signature: for operators that have no specification."""
    first, recover, attempt, traced = plan.links[0], plan.recover, plan.attempt, plan.traced
    fn, memory, compiling = first.call, plan.memory, fast_is_compiling()
    dual = plan.traces_otherwise

    def plain(*args: Any, **kwargs: Any) -> Any:
        if dual and compiling():
            return traced(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            answer = recover(error, args, kwargs)
            if answer is AGAIN:
                raise
            return answer

    def remembering(*args: Any, **kwargs: Any) -> Any:
        if dual and compiling():
            return traced(*args, **kwargs)
        link = memory.get(conditions(args, kwargs))
        if link is None:
            return attempt(args, kwargs)
        try:
            return link.call(*args, **kwargs)
        except Exception as error:
            answer = recover(error, args, kwargs, link)
            if answer is AGAIN:
                raise
            return answer

    return remembering if plan.remembering or first.conditional else plain
