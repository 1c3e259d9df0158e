"""What an operator is: the contract that all its implementations share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Relative and absolute tolerance against a float64 result, from the mantissa bits of each dtype
#: (bfloat16 7, float16 10, float32 23) with room for a reduction of a few thousand terms.
DEFAULT_TOLERANCES: Mapping[str, tuple[float, float]] = {
    "bfloat16": (1.6e-2, 1e-2),
    "float16": (2e-3, 1e-3),
    "float32": (1e-5, 1e-5),
    "float64": (1e-12, 1e-12),
}

_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "int | None": "int?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "str": "str",
    "str | None": "str?",
    "list[int]": "int[]",
    "list[int] | None": "int[]?",
}


@dataclass(frozen=True)
class Case:
    """One set of arguments for an operator, in the order of its signature."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class InputMaker:
    """Seeded tensors of one dtype on one device, for the input generators of the specs."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> None:
        import torch

        self.dtype, self.device = dtype, torch.device(device)
        # Drawn on the CPU and moved, so that every device sees the same numbers.
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers times `scale`."""
        import torch

        x = torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale
        return x.to(dtype or self.dtype).to(self.device)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        x = torch.rand(*shape, generator=self._generator, dtype=torch.float64) * (high - low) + low
        return x.to(dtype or self.dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Integers in ``[low, high)``; int32 unless `dtype` says otherwise."""
        import torch

        x = torch.randint(low, high, shape, generator=self._generator)
        return x.to(dtype or torch.int32).to(self.device)

    def permutation(self, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        return torch.randperm(n, generator=self._generator).to(dtype or torch.int32).to(self.device)

    def full(self, value: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        return torch.full(shape, value, dtype=dtype or self.dtype, device=self.device)

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class OpSpec:
    """An operator's contract.

    Args:
        fake: a function with the operator's signature and docstring whose body is the meta function: it
            returns empty tensors of the right shapes, dtypes and devices and computes nothing. Annotations
            are strings (``from __future__ import annotations``) out of Tensor, int, float, bool, str,
            list[int] and their ``| None`` forms.
        called_from: where vLLM calls it.
        mutates: names of the arguments that an implementation may write.
        cases: input generator: shapes regular, odd, large and empty, in the maker's dtype.
        sized: one case with that many tokens (or requests), of sizes that models have; for sweeps over the number of
            tokens, compilation and graph capture.
        canonical: called with the arguments by name and the results: the results in a form that is the same for all
            right answers, where the operator leaves something open.
        rounded: arguments, written ones, that carry the rounding of the inputs whatever their own dtype is.
        dtypes: names of the floating dtypes that `cases` makes sense in.
        tolerances: (relative, absolute) per dtype name where :data:`DEFAULT_TOLERANCES` do not fit.
    """

    fake: Callable[..., Any]
    called_from: str
    mutates: tuple[str, ...] = ()
    cases: Callable[[InputMaker], Iterable[Case]] | None = None
    sized: Callable[[InputMaker, int], Case] | None = None
    canonical: Callable[[Mapping[str, Any], tuple[Any, ...]], tuple[Any, ...]] | None = None
    rounded: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for field_name in ("mutates", "rounded"):
            unknown = set(getattr(self, field_name)) - set(self.signature.parameters)
            if unknown:
                raise ValueError(f"{self.name}: {field_name} names {sorted(unknown)}, not parameters of {self}")

    @property
    def name(self) -> str:
        return self.fake.__name__

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.fake) or ""

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.fake)

    @cached_property
    def first_tensor(self) -> int | None:
        """Position of the first parameter that is a tensor and not optional; its first dimension is that of tokens."""
        for index, p in enumerate(self.signature.parameters.values()):
            if str(p.annotation).rpartition(".")[2] == "Tensor" and p.kind is not p.KEYWORD_ONLY:
                return index
        return None

    def __str__(self) -> str:
        parameters = [p.replace(annotation=p.empty) for p in self.signature.parameters.values()]
        return f"{self.name}{inspect.Signature(parameters)}"

    def inputs(self, maker: InputMaker) -> Iterator[Case]:
        """The cases of this operator; none if the spec has no generator."""
        yield from self.cases(maker) if self.cases else ()

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """(relative, absolute) tolerance against a float64 result."""
        name = str(dtype).removeprefix("torch.")
        return self.tolerances.get(name) or DEFAULT_TOLERANCES[name]

    @cached_property
    def schema(self) -> str:
        """``torch.library`` schema; results are a list, so that one schema serves every number of results."""
        parts = []
        for index, p in enumerate(self.signature.parameters.values()):
            kind = _SCHEMA_TYPES[str(p.annotation)]
            if p.name in self.mutates:
                kind = kind.replace("Tensor", f"Tensor(a{index}!)")
            default = "" if p.default is p.empty else f"={_schema_default(p.default)}"
            parts.append(f"{kind} {p.name}{default}")
        return f"({', '.join(parts)}) -> Tensor[]"

    def mismatch(self, fn: Callable[..., Any]) -> str | None:
        """How the signature of `fn` differs from the operator's; None if it fits.

        An implementation takes the operator's parameters by the same names, in the same order, with the
        same defaults. It may leave out trailing parameters that have defaults (it is then not offered calls
        that give them another value) and may add parameters with defaults of its own.
        """
        theirs = inspect.signature(fn)
        given = list(theirs.parameters.values())
        if any(p.kind is p.VAR_POSITIONAL for p in given) and any(p.kind is p.VAR_KEYWORD for p in given):
            return None
        by_position = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for i, want in enumerate(self.signature.parameters.values()):
            if i >= len(by_position):
                if want.default is want.empty:
                    return f"parameter {want.name!r} is missing"
                break
            got = by_position[i]
            if got.name != want.name:
                return f"parameter {i + 1} is named {got.name!r}, the operator's is {want.name!r}"
            if got.default != want.default:
                return f"parameter {want.name!r} {_default(got)}, the operator's {_default(want)}"
        for extra in given:
            required = extra.default is extra.empty and extra.kind not in (extra.VAR_POSITIONAL, extra.VAR_KEYWORD)
            if extra.name not in self.signature.parameters and required:
                return f"parameter {extra.name!r} is not one of the operator's and has no default"
        return None


def _default(p: inspect.Parameter) -> str:
    return "has no default" if p.default is p.empty else f"defaults to {p.default!r}"


def _schema_default(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    return '"' + str(value) + '"'


def operator(**fields: Any) -> Callable[[Callable[..., Any]], OpSpec]:
    """Decorator that turns a meta function into an :class:`OpSpec`; the keywords are the spec's fields."""
    return lambda fake: OpSpec(fake=fake, **fields)
