"""The search space: the operators that take time, the implementations that may serve each, and their parameters."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from vllm_fl.dispatch.parameters import parse_variant, variant

#: An operator to the variant that serves it, for every operator of a search space. A variant is an implementation's id
#: with those of its parameters that are not defaults: ``flagos.triton(block=512, warps=8)``.
Mix = Mapping[str, str]


@dataclass(frozen=True)
class Dimension:
    """A parameter of an implementation, or the parameter in one bucket.

    Args:
        name: as in a variant, ``warps`` or ``warps.decode``.
        values: all that it may be, as text.
        default: that of the implementation.
    """

    name: str
    values: tuple[str, ...]
    default: str

    def neighbours(self, value: str) -> Iterator[str]:
        """The next smaller and the next larger number; all others where `value` or they are no numbers."""
        numbers = [other for other in self.values if other.isdecimal()]
        if value not in numbers:
            yield from (other for other in self.values if other != value)
            return
        at = numbers.index(value)
        yield from numbers[at + 1 : at + 2]
        yield from numbers[max(at - 1, 0) : at]
        yield from (other for other in self.values if other not in numbers)


@dataclass(frozen=True)
class Operator:
    """One operator of a search space.

    Args:
        name: the operator.
        implementations: variants of those that may serve it, as the baseline's policy has them; the baseline's first.
        share: of the time under the baseline, between 0 and 1.
        dimensions: id of an implementation to what may be varied of it.
    """

    name: str
    implementations: tuple[str, ...]
    share: float
    dimensions: Mapping[str, tuple[Dimension, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def values(self, chosen: str) -> dict[str, str]:
        """The value of each dimension of a variant."""
        impl_id, changed = parse_variant(chosen)
        return {d.name: changed.get(d.name, d.default) for d in self.dimensions.get(impl_id, ())}

    def variant(self, impl_id: str, values: Mapping[str, str]) -> str:
        """The variant of an implementation with these values of its dimensions."""
        dimensions = self.dimensions.get(impl_id, ())
        return variant(impl_id, {d.name: values[d.name] for d in dimensions if values[d.name] != d.default})

    def neighbours(self, chosen: str) -> Iterator[str]:
        """The variants of the same implementation that have one other value, next to the present one."""
        impl_id, values = parse_variant(chosen)[0], self.values(chosen)
        for dimension in self.dimensions.get(impl_id, ()):
            for value in dimension.neighbours(values[dimension.name]):
                yield self.variant(impl_id, {**values, dimension.name: value})

    @property
    def size(self) -> int:
        """Number of variants."""
        ids = (parse_variant(implementation)[0] for implementation in self.implementations)
        return sum(math.prod(len(d.values) for d in self.dimensions.get(impl_id, ())) for impl_id in ids)


@dataclass(frozen=True)
class SearchSpace:
    """Operators, the largest share first.

    Raises:
        ValueError: an operator is named twice, or has no implementation.
    """

    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        names = [operator.name for operator in self.operators]
        if len(set(names)) < len(names):
            raise ValueError(f"an operator is named twice in {', '.join(names)}")
        empty = [operator.name for operator in self.operators if not operator.implementations]
        if empty:
            raise ValueError(f"{', '.join(empty)}: no implementation")
        object.__setattr__(self, "operators", tuple(sorted(self.operators, key=lambda o: (-o.share, o.name))))

    @cached_property
    def baseline(self) -> Mix:
        """The mix that the policy chooses by itself."""
        return {operator.name: operator.implementations[0] for operator in self.operators}

    def operator(self, name: str) -> Operator:
        """The operator of that name."""
        return next(operator for operator in self.operators if operator.name == name)

    @cached_property
    def size(self) -> int:
        """Number of mixes."""
        return math.prod(operator.size for operator in self.operators)

    @cached_property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Name to values of everything that can be chosen: implementations, and each dimension of each of them."""
        found = {}
        for operator in self.operators:
            ids = [parse_variant(implementation)[0] for implementation in operator.implementations]
            found[operator.name] = tuple(ids)
            for impl_id in ids:
                for dimension in operator.dimensions.get(impl_id, ()):
                    found[_name(operator.name, impl_id, dimension.name)] = dimension.values
        return found

    def chosen(self, mix: Mix) -> dict[str, str]:
        """A mix as values of :attr:`choices`; what it does not say is as in the baseline."""
        found = {}
        for operator in self.operators:
            impl_id, _ = parse_variant(mix[operator.name])
            found[operator.name] = impl_id
            for each in operator.implementations:
                own = parse_variant(each)[0]
                values = operator.values(mix[operator.name] if own == impl_id else each)
                found.update({_name(operator.name, own, name): value for name, value in values.items()})
        return found

    def mix(self, chosen: Mapping[str, str]) -> Mix:
        """The mix of such values; dimensions of implementations that are not chosen do not count."""
        found = {}
        for operator in self.operators:
            impl_id = chosen[operator.name]
            names = [d.name for d in operator.dimensions.get(impl_id, ())]
            values = {name: chosen[_name(operator.name, impl_id, name)] for name in names}
            found[operator.name] = operator.variant(impl_id, values)
        return found

    def fingerprint(self) -> str:
        """Text that is equal for equal choices only; shares, which differ from profile to profile, do not count."""
        implementations = {operator.name: list(operator.implementations) for operator in self.operators}
        dimensions = {name: list(values) for name, values in self.choices.items() if name not in implementations}
        choices = {**implementations, **dimensions}
        return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


def search_space(
    shares: Mapping[str, float],
    accepted: Mapping[str, Iterable[str]],
    *,
    min_share: float = 0.0,
    dimensions: Mapping[str, Mapping[str, tuple[Dimension, ...]]] = MappingProxyType({}),
) -> SearchSpace:
    """The operators that a profile saw and for which there is a choice.

    Args:
        shares: operator to its share of the time, as a profile has found.
        accepted: operator to the variants that the policy accepts, the chosen one first.
        min_share: operators below it are left out: a share is the most that an operator can save.
        dimensions: operator to implementation to what may be varied of it.
    """
    operators = []
    for name, share in shares.items():
        operator = Operator(name, tuple(accepted.get(name, ())), share, dimensions.get(name, {}))
        if operator.size > 1 and share >= min_share:
            operators.append(operator)
    return SearchSpace(tuple(operators))


def changes(mix: Mix, against: Mix) -> dict[str, str]:
    """The operators that `mix` serves by another variant than `against`, and that variant."""
    return {name: chosen for name, chosen in mix.items() if against[name] != chosen}


def _name(operator: str, impl_id: str, dimension: str) -> str:
    return f"{operator} {impl_id} {dimension}"
