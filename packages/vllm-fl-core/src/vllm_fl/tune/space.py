"""The search space: the operators that take time, each with the implementations that may serve it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

#: An operator to the implementation that serves it, for every operator of a search space.
Mix = Mapping[str, str]


@dataclass(frozen=True)
class Operator:
    """One operator of a search space.

    Args:
        name: the operator.
        implementations: ids of those that may serve it, that of the baseline first.
        share: of the time under the baseline, between 0 and 1.
    """

    name: str
    implementations: tuple[str, ...]
    share: float


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

    @cached_property
    def size(self) -> int:
        """Number of mixes."""
        product = 1
        for operator in self.operators:
            product *= len(operator.implementations)
        return product

    def fingerprint(self) -> str:
        """Text that is equal for equal choices only; shares, which differ from profile to profile, do not count."""
        choices = {operator.name: list(operator.implementations) for operator in self.operators}
        return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


def search_space(
    shares: Mapping[str, float], accepted: Mapping[str, Iterable[str]], *, min_share: float = 0.0
) -> SearchSpace:
    """The operators that a profile saw and for which there is a choice.

    Args:
        shares: operator to its share of the time, as a profile has found.
        accepted: operator to the implementations that the policy accepts, the chosen one first.
        min_share: operators below it are left out: a share is the most that an operator can save.
    """
    operators = []
    for name, share in shares.items():
        implementations = tuple(accepted.get(name, ()))
        if len(implementations) > 1 and share >= min_share:
            operators.append(Operator(name, implementations, share))
    return SearchSpace(tuple(operators))


def changes(mix: Mix, against: Mix) -> dict[str, str]:
    """The operators that `mix` serves by another implementation than `against`, and that implementation."""
    return {name: chosen for name, chosen in mix.items() if against[name] != chosen}
