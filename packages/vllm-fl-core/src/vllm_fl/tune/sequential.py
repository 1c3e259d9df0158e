"""A sequential test between a baseline and a candidate that are measured in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

#: What a test has found: the candidate is faster; it is not, by an amount worth having; neither is certain.
Decision = Literal["better", "not better", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """The candidate against the baseline.

    Args:
        decision: what has been found.
        log_ratio: logarithm of baseline's cost / candidate's cost: positive where the candidate is faster.
        low, high: confidence interval of `log_ratio`.
        rounds: number of pairs that were measured.
    """

    decision: Decision
    log_ratio: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Rule:
    """When to look, and how sure to be.

    The test looks at the pairs after a growing number of rounds. Each look has an equal part of the allowed error
    (Bonferroni), so that the confidence holds for the whole of it, however early it stops; see Jennison and Turnbull,
    Group Sequential Methods, 2000. Within a look it is Student's t test of the paired logarithms: what changes both
    costs of a pair, such as a clock that slows down, cancels.

    Args:
        confidence: probability that the interval holds the truth, over all looks together.
        min_gain: gains below this part of the cost are not worth having; a candidate that certainly has no more is
            given up.
        max_rounds: number of pairs at the last look.
        first: number of pairs at the first look, at least 2.
        growth: factor from one look to the next.
    """

    confidence: float = 0.95
    min_gain: float = 0.005
    max_rounds: int = 40
    first: int = 4
    growth: float = 1.6

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1.0:
            raise ValueError(f"confidence: {self.confidence} is not between 0.5 and 1")
        if not 2 <= self.first <= self.max_rounds:
            raise ValueError(f"first: {self.first} is not between 2 and max_rounds, {self.max_rounds}")
        if self.growth <= 1.0:
            raise ValueError(f"growth: {self.growth} is not above 1")

    @cached_property
    def looks(self) -> tuple[int, ...]:
        """The numbers of pairs after which the test looks."""
        found, size = [], float(self.first)
        while round(size) < self.max_rounds:
            found.append(round(size))
            size = max(size * self.growth, size + 1)
        return (*found, self.max_rounds)

    def single(self, rounds: int) -> Rule:
        """The same with one look, after `rounds` pairs."""
        return Rule(self.confidence, self.min_gain, rounds, rounds)


class SequentialTest:
    """Takes pairs of costs until it is certain, or has seen as many as the rule allows."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # Welford's sums

    def add(self, baseline: float, candidate: float) -> bool:
        """Add the two costs of a round; whether the test is over.

        Raises:
            ValueError: a cost is not a positive number.
        """
        if not (0.0 < baseline < math.inf and 0.0 < candidate < math.inf):
            raise ValueError(f"costs {baseline} and {candidate} are not positive numbers")
        value = math.log(baseline / candidate)
        self._count += 1
        before = self._mean
        self._mean += (value - before) / self._count
        self._squares += (value - before) * (value - self._mean)
        if self._count >= self._rule.max_rounds:
            return True
        return self._count in self._rule.looks and self.result().decision != "undecided"

    def result(self) -> Comparison:
        """What the pairs say so far."""
        if self._count < 2:
            return Comparison("undecided", self._mean, -math.inf, math.inf, self._count)
        looks = len(self._rule.looks)
        error = math.sqrt(self._squares / (self._count - 1) / self._count)
        width = error * _quantile(1.0 - (1.0 - self._rule.confidence) / looks / 2.0, self._count - 1)
        low, high = self._mean - width, self._mean + width
        decision: Decision = "undecided"
        if low > 0.0:
            decision = "better"
        elif high < math.log1p(self._rule.min_gain):
            decision = "not better"
        return Comparison(decision, self._mean, low, high, self._count)


@lru_cache(maxsize=1024)
def _quantile(probability: float, freedom: int) -> float:
    """Of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
