"""One accepted implementation of a plan: what it takes, what it refuses, how it is called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_fl.catalog import OpSpec

from .failures import describe
from .parameters import Configuration
from .types import OpImpl, dtype_name

Call = Callable[..., Any]
Hook = Callable[[], None]


class LeftOut(NamedTuple):
    """A parameter of the operator that the implementation does not take."""

    name: str
    position: int | None  #: its position, or None if it is keyword-only
    default: Any

    def is_default(self, value: Any) -> bool:
        if value is self.default:
            return True
        # A tensor compared with a number gives a tensor.
        return isinstance(value, (int, float, str)) and bool(value == self.default)


class Link:
    """A candidate as a plan calls it.

    ``call`` takes the operator's arguments, all of them, as the plan passes them; ``fn`` those that the implementation
    takes.

    Args:
        impl: the implementation.
        index: its place in the plan.
        spec: the operator's specification, if it has one.
        hooks: to be run after each call.
        function: what to call in place of the implementation's function, with its parameters if there are any.
        configuration: the parameters that the plan's function is to pass by itself; `function` is then the
            implementation's own with nothing around it.
        own: the implementation's function with its parameters.
    """

    __slots__ = ("call", "configuration", "dtypes", "fn", "impl", "index", "left_out", "own", "tensor_index")

    def __init__(
        self,
        impl: OpImpl,
        index: int,
        spec: OpSpec | None,
        hooks: tuple[Hook, ...] = (),
        function: Call | None = None,
        configuration: Configuration | None = None,
        own: Call | None = None,
    ) -> None:
        self.impl = impl
        self.index = index
        self.configuration = configuration
        self.own = own or impl.fn
        function = function or impl.fn
        self.fn: Call = _observed(function, hooks) if hooks else function
        self.left_out = _left_out(spec, impl.fn) if spec is not None else ()
        self.call: Call = _without(self.fn, self.left_out) if self.left_out else self.fn
        self.tensor_index = spec.first_tensor if spec is not None else None
        self.dtypes = _dtypes(impl)

    @property
    def impl_id(self) -> str:
        return self.impl.impl_id

    @property
    def dtype_objects(self) -> tuple[Any, ...]:
        """The accepted dtypes, those of torch first: among a few, a search by identity beats a hash."""
        return tuple(sorted(self.dtypes or (), key=lambda dtype: isinstance(dtype, str)))

    @property
    def conditional(self) -> bool:
        """Whether it may refuse arguments before it is called."""
        return self.dtypes is not None or bool(self.left_out) or self.impl.supports is not None

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why it does not take these arguments; None if it does. The support check's exceptions are refusals."""
        dtype = self._dtype(args)
        if dtype is not None and self.dtypes is not None and dtype_name(dtype) not in self.dtypes:
            names = sorted(name for name in self.dtypes if isinstance(name, str))
            return f"does not support {dtype_name(dtype)} (only {', '.join(names)})"
        for parameter in self.left_out:
            value = _value(parameter, args, kwargs)
            if not parameter.is_default(value):
                shown = repr(value) if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
                return f"does not take {parameter.name!r}, which this call sets to {shown}"
        if self.impl.supports is None:
            return None
        try:
            answer = self.impl.supports(*args, **kwargs)
        except Exception as error:  # a vendor's check may fail in any way; the reason is kept
            return f"its support check raised {describe(error)}"
        if isinstance(answer, str) and answer:
            return answer
        return None if answer else "its support check says no"

    def fits_traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """The same question, in a form that Dynamo can trace; an opaque implementation's check is left to run time."""
        dtype = self._dtype(args)
        if dtype is not None and self.dtypes is not None and dtype not in self.dtypes:
            return False
        for parameter in self.left_out:
            if not parameter.is_default(_value(parameter, args, kwargs)):
                return False
        if self.impl.supports is None or self.impl.opaque:
            return True
        answer = self.impl.supports(*args, **kwargs)
        return bool(answer) and not isinstance(answer, str)

    def _dtype(self, args: tuple[Any, ...]) -> Any:
        if self.dtypes is None:
            return None
        if self.tensor_index is not None:
            return getattr(args[self.tensor_index], "dtype", None)
        for value in args:
            if hasattr(value, "dtype"):
                return value.dtype
        return None


def _left_out(spec: OpSpec, fn: Call) -> tuple[LeftOut, ...]:
    theirs = inspect.signature(fn).parameters
    kinds = {p.kind for p in theirs.values()}
    takes_any_position = inspect.Parameter.VAR_POSITIONAL in kinds
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    missing = []
    for index, (name, parameter) in enumerate(spec.signature.parameters.items()):
        by_name_only = parameter.kind is parameter.KEYWORD_ONLY
        given = theirs.get(name)
        if by_name_only:
            taken = given is not None or takes_any_name
        else:
            taken = takes_any_position or (given is not None and given.kind is not given.KEYWORD_ONLY)
        if not taken:
            missing.append(LeftOut(name, None if by_name_only else index, parameter.default))
    return tuple(missing)


def _without(fn: Call, left_out: tuple[LeftOut, ...]) -> Call:
    """`fn`, called with the operator's arguments less those that it does not take (which are the last ones)."""
    count = min((p.position for p in left_out if p.position is not None), default=sys.maxsize)
    names = frozenset(p.name for p in left_out)

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
        return fn(*args[:count], **kwargs)

    return call


def _value(parameter: LeftOut, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if parameter.position is not None and parameter.position < len(args):
        return args[parameter.position]
    return kwargs.get(parameter.name, parameter.default)


def _dtypes(impl: OpImpl) -> frozenset[Any] | None:
    """The names of the accepted dtypes, and the dtypes themselves if torch is loaded."""
    if impl.supported_dtypes is None:
        return None
    names = {dtype_name(dtype) for dtype in impl.supported_dtypes}
    torch = sys.modules.get("torch")
    objects = {getattr(torch, name) for name in names if hasattr(torch, name)}
    return frozenset(names | objects)


def _observed(fn: Call, hooks: tuple[Hook, ...]) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        for hook in hooks:
            hook()
        return result

    return call
