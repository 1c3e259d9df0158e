"""Parameters that implementations declare (block sizes, warps, thresholds), and their values under a policy.

An implementation takes a parameter as a keyword argument of its function. The values are decided when the operator is
bound and stand as constants in the bound function, so that a call costs no more than one that writes them itself. Where
all have their defaults nothing is passed. An implementation may ask for buckets of the number of tokens, each with
values of its own; the bound function then compares the number once.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_fl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from vllm_fl.catalog import OpSpec

    from .policy import SelectionPolicy
    from .types import OpImpl

#: A value of a parameter; None, written ``auto``, leaves the choice to the implementation.
Value = bool | int | str | None

AUTO = "auto"
_WORD = re.compile(r"[A-Za-z0-9_.\-]+")


def text_of(value: Value) -> str:
    """A value as it is written in a configuration."""
    if value is None:
        return AUTO
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Parameter:
    """A tunable parameter of an implementation.

    Args:
        name: of the keyword argument.
        values: all that it may be, neighbours in order of size: a search goes from neighbour to neighbour.
        default: what the function itself has as the default of the argument.

    Raises:
        ValueError: a name or value that cannot be written in a configuration, or a default that is not among `values`.
    """

    name: str
    values: tuple[Value, ...]
    default: Value

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.name.isidentifier():
            raise ValueError(f"parameter {self.name!r}: the name of an argument is expected")
        wrong = [value for value in self.values if not _WORD.fullmatch(text_of(value))]
        if wrong:
            raise ValueError(f"parameter {self.name}: {wrong[0]!r} cannot be written as one word")
        if len(self.by_text) < max(2, len(self.values)):
            raise ValueError(f"parameter {self.name}: {self.shown} are not at least two different values")
        if text_of(self.default) not in self.by_text:
            raise ValueError(f"parameter {self.name}: the default {self.default!r} is not one of {self.shown}")

    @cached_property
    def by_text(self) -> Mapping[str, Value]:
        """The values, by the text that means them."""
        return {text_of(value): value for value in self.values}

    @property
    def shown(self) -> str:
        return ", ".join(map(text_of, self.values))


class Bucket(NamedTuple):
    """A range of numbers of tokens."""

    name: str
    most: int | None = None  #: the largest number; None for the last bucket, which has all the others


class ParameterPath(NamedTuple):
    """What a setting is about."""

    operator: str
    implementation: str
    parameter: str
    bucket: str = ""  #: empty for all buckets, and for implementations without

    def __str__(self) -> str:
        return ".".join(filter(None, self))


class Setting(NamedTuple):
    """The value that a parameter has."""

    name: str  #: of the parameter, ``NAME.BUCKET`` where the implementation has buckets
    value: Value
    parameter: Parameter
    origin: str  #: where it was set; empty for the default

    @property
    def is_default(self) -> bool:
        return text_of(self.value) == text_of(self.parameter.default)

    def __str__(self) -> str:
        return f"{self.name}={text_of(self.value)}"


@dataclass(frozen=True)
class Configuration:
    """The keyword arguments that an implementation is called with, by number of tokens.

    Args:
        keywords: for each bucket those that are not the defaults; one entry if the number of tokens does not matter.
        limits: the largest number of tokens of each bucket but the last.
        position, tensor: of the argument whose first dimension is the number of tokens.
    """

    keywords: tuple[Mapping[str, Value], ...]
    limits: tuple[int, ...] = ()
    position: int = 0
    tensor: str = ""

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with these keyword arguments."""
        calls = [partial(fn, **keywords) if keywords else fn for keywords in self.keywords]
        if not self.limits:
            return calls[0]
        limits, position, name = self.limits, self.position, self.tensor

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position] if position < len(args) else kwargs[name]
            return calls[bisect_left(limits, tensor.shape[0])](*args, **kwargs)

        return call

    def calls(self, fn: str, arguments: str) -> Iterator[str]:
        """The lines of source that call `fn` so, and return its result."""
        for index, keywords in enumerate(self.keywords):
            given = "".join(f", {name}={value!r}" for name, value in keywords.items())
            if index < len(self.limits):
                yield f"if {self.tensor}.shape[0] <= {self.limits[index]}:"
                yield f"    return {fn}({arguments}{given})"
            else:
                yield f"return {fn}({arguments}{given})"


def check_declaration(parameters: Iterable[Parameter], buckets: tuple[Bucket, ...], opaque: bool) -> None:
    """Refuse parameters and buckets that contradict themselves.

    Raises:
        ValueError: two parameters of one name; buckets that do not rise, or that torch.compile would decide for all
            numbers of tokens at once.
    """
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise ValueError(f"a parameter is declared twice: {', '.join(names)}")
    if not buckets:
        return
    if not opaque:
        raise ValueError("buckets need opaque=True: torch.compile would decide once for all numbers of tokens")
    names = [bucket.name for bucket in buckets]
    limits = [bucket.most for bucket in buckets if bucket.most is not None]
    is_rising = limits and limits == sorted(set(limits)) and [*limits, None] == [bucket.most for bucket in buckets]
    if not is_rising or len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
        shown = ", ".join(f"{bucket.name}: {bucket.most}" for bucket in buckets)
        raise ValueError(f"buckets {shown}: names are expected, with rising numbers of tokens, and None for the last")


def check_function(impl: OpImpl, spec: OpSpec | None) -> str | None:
    """Why the function cannot be called with the declared parameters; None if it can.

    Raises:
        TypeError, ValueError: the function has no signature that can be read.
    """
    theirs = inspect.signature(impl.fn).parameters if impl.parameters else {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in theirs.values())
    for parameter in impl.parameters:
        given = theirs.get(parameter.name)
        if spec is not None and parameter.name in spec.signature.parameters:
            return f"parameter {parameter.name!r} has the name of an argument of the operator"
        if given is None and not takes_any:
            return f"it takes no keyword argument {parameter.name!r}, which it declares as a parameter"
        if given is not None and text_of(given.default) != text_of(parameter.default):
            return f"{parameter.name!r} defaults to {given.default!r}, the parameter to {parameter.default!r}"
    if impl.buckets and (spec is None or spec.first_tensor is None):
        return "it has buckets of the number of tokens, and the operator has no tensor to tell that number from"
    return None


def problem_with(impl: OpImpl, path: ParameterPath, text: str) -> str | None:
    """What is wrong with a setting of one of the implementation's parameters; None if nothing is."""
    declared = {parameter.name: parameter for parameter in impl.parameters}
    parameter = declared.get(path.parameter)
    if parameter is None:
        known = f"known: {', '.join(declared)}" if declared else "it has none"
        return f"unknown parameter {path.parameter!r} ({known}){did_you_mean(path.parameter, declared)}"
    buckets = [bucket.name for bucket in impl.buckets]
    if path.bucket and path.bucket not in buckets:
        known = f"known: {', '.join(buckets)}" if buckets else "it has none; give one value"
        return f"unknown bucket {path.bucket!r} ({known}){did_you_mean(path.bucket, buckets)}"
    if text not in parameter.by_text:
        return f"{text!r} is not one of {parameter.shown}{did_you_mean(text, parameter.by_text)}"
    return None


def settings_of(impl: OpImpl, policy: SelectionPolicy) -> tuple[Setting, ...]:
    """The value of each parameter of an implementation, bucket by bucket.

    Raises:
        ConfigError: `policy` sets a parameter, bucket or value that the implementation does not have.
    """
    given = policy.get_parameters(impl.op_name, impl.impl_id)
    for path, text in given.items():
        wrong = problem_with(impl, path, text)
        if wrong is not None:
            raise ConfigError(f"{policy.origin(f'parameters.{path}')}: parameters.{path}: {wrong}")
    found = []
    for parameter in impl.parameters:
        everywhere = ParameterPath(impl.op_name, impl.impl_id, parameter.name)
        for bucket in impl.buckets or (Bucket(""),):
            own = everywhere._replace(bucket=bucket.name)
            path = own if own in given else everywhere
            name = f"{parameter.name}.{bucket.name}" if bucket.name else parameter.name
            value = parameter.by_text[given[path]] if path in given else parameter.default
            found.append(Setting(name, value, parameter, policy.origin(f"parameters.{path}") if path in given else ""))
    return tuple(found)


def configuration_of(impl: OpImpl, settings: Iterable[Setting], spec: OpSpec | None) -> Configuration | None:
    """How an implementation is called with these settings; None: as it is."""
    buckets = impl.buckets or (Bucket(""),)
    keywords: dict[str, dict[str, Value]] = {bucket.name: {} for bucket in buckets}
    for setting in settings:
        if not setting.is_default:
            keywords[setting.name.partition(".")[2]][setting.parameter.name] = setting.value
    each = tuple(keywords.values())
    if not any(each):
        return None
    if spec is None or all(entry == each[0] for entry in each):
        return Configuration(each[:1])
    position = spec.first_tensor or 0
    limits = tuple(bucket.most for bucket in buckets if bucket.most is not None)
    return Configuration(each, limits, position, list(spec.signature.parameters)[position])


def variant(impl_id: str, values: Mapping[str, str]) -> str:
    """``ID(NAME=VALUE, ...)``: an implementation and those of its settings that are not defaults, if any."""
    if not values:
        return impl_id
    return f"{impl_id}({', '.join(f'{name}={text}' for name, text in sorted(values.items()))})"


def parse_variant(text: str) -> tuple[str, dict[str, str]]:
    """What :func:`variant` was made of."""
    impl_id, _, inside = text.rstrip(")").partition("(")
    pairs = (part.partition("=") for part in inside.split(", ") if part)
    return impl_id, {name: value for name, _, value in pairs}


def nested(settings: Iterable[tuple[ParameterPath, str]]) -> dict[str, Any]:
    """Settings as the key ``parameters`` of a configuration file has them."""
    document: dict[str, Any] = {}
    for path, text in settings:
        of_impl = document.setdefault(path.operator, {}).setdefault(path.implementation, {})
        value = int(text) if text.isdecimal() else text
        if path.bucket:
            of_impl.setdefault(path.parameter, {})[path.bucket] = value
        else:
            of_impl[path.parameter] = value
    return document


def flat(document: Mapping[str, Any]) -> dict[ParameterPath, str]:
    """What :func:`nested` was made of."""
    found = {}
    for operator, implementations in document.items():
        for implementation, parameters in implementations.items():
            for parameter, value in parameters.items():
                for bucket, one in value.items() if isinstance(value, Mapping) else [("", value)]:
                    found[ParameterPath(operator, implementation, parameter, bucket)] = text_of(one)
    return found
