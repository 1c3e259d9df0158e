"""The inputs of one call in a file, and what the implementations make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_fl.catalog import OpSpec
from vllm_fl.dispatch import OpManager, get_default_manager
from vllm_fl.dispatch.links import Link
from vllm_fl.dispatch.parameters import parse_variant
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.errors import FLError, UnknownOperatorError
from vllm_fl.testing.comparison import canonical, listed

from .values import Difference, differences


class DumpError(FLError, ValueError):
    """A file that is no dump, or one of an operator or implementation that is not here."""


@dataclass(frozen=True)
class Dump:
    """The inputs of one call.

    Args:
        operator: the operator.
        first, second: the two implementations that differed, with the values of their parameters, if they have any.
        step, module, rank: where the call was.
        inputs: every argument by name, as it was before the call.
    """

    operator: str
    first: str
    second: str
    step: int
    module: str
    rank: int
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Replayed:
    """One implementation on the inputs of a dump: its differences to the first one, or what it raised."""

    implementation: str
    differences: tuple[Difference, ...]
    failed: str = ""

    @property
    def within(self) -> bool:
        """Whether it ran and every entry is within the tolerance."""
        return not self.failed and all(difference.within for difference in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data, ready for JSON."""
        return {**vars(self), "differences": [difference.as_dict() for difference in self.differences]}


def protected(spec: OpSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with copies in place of the tensors that the operator may write; weights are not copied."""
    return {
        name: value.clone() if name in spec.mutates and isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def save_dump(dump: Dump, directory: Path) -> Path:
    """Write a dump; its name says which operator, step and rank it is of."""
    directory.mkdir(parents=True, exist_ok=True)
    names = f"{dump.operator}-{dump.first}-{dump.second}-step{dump.step}-rank{dump.rank}"
    path = directory / f"{names}.pt"
    torch.save(vars(dump), path)
    return path


def load_dump(path: Path) -> Dump:
    """Read a dump; nothing in it can run code.

    Raises:
        OSError: the file cannot be read.
        DumpError: it is no dump.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        return Dump(**document)
    except OSError:
        raise
    except Exception as error:  # a file of any other kind fails in many ways
        text = " ".join(str(error).split())[:200]
        raise DumpError(f"{path} holds no inputs of an operator ({type(error).__name__}: {text})") from error


def replay(dump: Dump, *, device: str = "cpu", manager: OpManager | None = None) -> list[Replayed]:
    """Run the dump's two implementations, and every other one that is available, on its inputs.

    The differences are those to the dump's first implementation, or to the first one that runs if that does not.

    Raises:
        UnknownOperatorError: the operator is not known here.
        DumpError: none of its implementations can run on these inputs.
    """
    manager = manager or get_default_manager()
    manager.ensure_initialized()
    spec = manager.registry.spec(dump.operator)
    if spec is None:
        raise UnknownOperatorError(f"operator {dump.operator!r} of the file is neither in the catalogue nor registered")
    outcomes: dict[str, Any] = {}
    variants = [
        (name, impl)
        for impl in manager.registry.get_implementations(dump.operator)
        if impl.is_available()
        for name in _variants_of(impl.impl_id, dump)
    ]
    for index, (name, impl) in enumerate(variants):
        bound = spec.signature.bind_partial()
        bound.arguments.update({
            name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in dump.inputs.items()
        })  # fmt: skip
        try:
            link = Link(impl, index, spec, function=_with_parameters(impl, name))
            refusal = link.refusal(bound.args, bound.kwargs)
            result = None if refusal else listed(link.call(*bound.args, **bound.kwargs))
        except Exception as error:  # an implementation may fail in any way; that is a result, too
            outcomes[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if result is None:
            outcomes[name] = f"refuses these inputs: {refusal}"
            continue
        written = {name: bound.arguments[name] for name in spec.mutates if name in bound.arguments}
        outcomes[name] = canonical(spec, bound.arguments, result), written
    ran = [name for name, outcome in outcomes.items() if not isinstance(outcome, str)]
    if not ran:
        reasons = "; ".join(f"{name}: {text}" for name, text in outcomes.items()) or "none is available"
        raise DumpError(f"no implementation of {dump.operator} runs on these inputs here: {reasons}")
    base = dump.first if dump.first in ran else ran[0]
    order = [base, *(name for name in (dump.second, *sorted(outcomes)) if name != base and name in outcomes)]
    return [
        Replayed(name, (), outcomes[name])
        if isinstance(outcomes[name], str)
        else Replayed(name, tuple(differences(spec, outcomes[name], outcomes[base])))
        for name in dict.fromkeys(order)
    ]


def _variants_of(impl_id: str, dump: Dump) -> list[str]:
    """The dump's variants of this implementation; of another one itself."""
    named = [name for name in (dump.first, dump.second) if parse_variant(name)[0] == impl_id]
    return list(dict.fromkeys(named)) or [impl_id]


def _with_parameters(impl: OpImpl, variant: str) -> Callable[..., Any]:
    values = parse_variant(variant)[1]
    by_name = {parameter.name: parameter for parameter in impl.parameters}
    for name, text in values.items():
        if name not in by_name or text not in by_name[name].by_text:
            raise DumpError(f"{impl.impl_id} has no value {text} of a parameter {name} here")
    return functools.partial(impl.fn, **{name: by_name[name].by_text[text] for name, text in values.items()})
