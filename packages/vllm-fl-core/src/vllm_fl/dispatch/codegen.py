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

from .conditions import TENSOR_FACTS, condition, conditions
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
    call: Call = _factory(_source(spec, first, plan.remembering or first.impl.supports is not None))(
        fn=first.fn if first.configuration is None else first.impl.fn,
        plan=plan,
        dtypes=first.dtype_objects,
        compiling=fast_is_compiling(),
        defaults={name: p.default for name, p in spec.signature.parameters.items()},
        again=AGAIN,
    )
    call.__qualname__ = f"{spec}: call"
    return call


def make_key(spec: OpSpec | None) -> Callable[..., Any]:
    """A function of the operator's arguments that gives the conditions of a call."""
    if spec is None or any(p.kind not in _SIMPLE for p in spec.signature.parameters.values()):
        return lambda *args, **kwargs: conditions(args, kwargs)
    names = _Names(spec, ())
    parts = ", ".join(_key_part(p) for p in spec.signature.parameters.values())
    lines = [
        "def make(*, other, conditions, defaults):",
        *(f"    _default_{name} = defaults[{name!r}]" for name in names.optional),
        f"    def key({names.parameters}):",
        "        try:",
        f"            return ({parts},)",
        "        except (AttributeError, TypeError):",
        f"            return conditions({names.args}, {names.kwargs})",
        "    return key",
    ]
    defaults = {name: p.default for name, p in spec.signature.parameters.items()}
    return _factory("\n".join(lines))(other=condition, conditions=conditions, defaults=defaults)


def _key_part(parameter: Parameter) -> str:
    """Source of the condition of one argument, for arguments of the types that the specification says."""
    name, kind = parameter.name, str(parameter.annotation)
    tensor = ", ".join(f"{name}.{fact}" for fact in TENSOR_FACTS)
    if kind in ("bool", "str"):
        return name
    if kind in ("int", "float"):
        return f"{name}.__class__, {name}"
    if kind.endswith("Tensor"):
        return tensor
    if kind.endswith("Tensor | None"):
        return f"None if {name} is None else ({tensor})"
    return f"other({name})"


@cache
def _factory(source: str) -> Callable[..., Call]:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<string>", "exec"), namespace)
    make: Callable[..., Call] = namespace["make"]
    return make


def _source(spec: OpSpec, first: Link, remembering: bool) -> str:
    names = _Names(spec, first.left_out)
    if_compiling = ["if _compiling():", f"    return _traced({names.forward})"]
    body = []
    if remembering:
        body += [
            *if_compiling,
            "try:",
            f"    _link = _memory.get(_key({names.forward}))",
            "except TypeError:",
            "    _link = None",
            "if _link is None:",
            f"    return _attempt({names.args}, {names.kwargs})",
            *_guarded([f"return _link.call({names.forward})"], f"{names.args}, {names.kwargs}, _link"),
        ]
    else:
        if first.impl.opaque:
            body += if_compiling
        if first.conditional:
            body += [
                "try:",
                f"    _fits = {_fits(spec, first)}",
                "except AttributeError:",
                "    _fits = False",
                "if not _fits:",
                *(f"    {line}" for line in if_compiling),
                f"    return _attempt({names.args}, {names.kwargs})",
            ]
        calls = [f"return _fn({names.taken})"]
        if first.configuration is not None:
            calls = list(first.configuration.calls("_fn", names.taken))
        body += _guarded(calls, f"{names.args}, {names.kwargs}")
    lines = [
        "def make(*, fn, plan, dtypes, compiling, defaults, again):",
        "    _fn, _dtypes, _compiling, _again, _key = fn, dtypes, compiling, again, plan.key",
        "    _memory, _attempt, _recover, _traced = plan.memory, plan.attempt, plan.recover, plan.traced",
        *(f"    _default_{name} = defaults[{name!r}]" for name in names.optional),
        f"    def {spec.name}({names.parameters}):",
        *(f"        {line}" for line in body),
        f"    return {spec.name}",
    ]
    return "\n".join(lines)


def _guarded(calls: list[str], recovery: str) -> list[str]:
    return [
        "try:",
        *(f"    {line}" for line in calls),
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
    fn, key, memory, compiling = first.call, plan.key, plan.memory, fast_is_compiling()

    def plain(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            answer = recover(error, args, kwargs)
            if answer is AGAIN:
                raise
            return answer

    def remembering(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return traced(*args, **kwargs)
        try:
            link = memory.get(key(*args, **kwargs))
        except TypeError:
            link = None
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
