"""A sequential test between a baseline and a candidate that are measured in turn."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, combinations_with_replacement, takewhile
from typing import Literal

#: Ranks of fewer pairs are certain of nothing at the levels that are used here.
RANKED = 10
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
    Group Sequential Methods, 2000. It looks at the paired logarithms: what changes both costs of a pair, such as a
    clock that slows down, cancels. From :data:`RANKED` pairs on a look is Wilcoxon's signed-rank test with the interval
    of Hodges and Lehmann, which the outliers of a busy machine hardly move; before, it is Student's t test.

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
        self._values: list[float] = []

    def add(self, baseline: float, candidate: float) -> bool:
        """Add the two costs of a round; whether the test is over.

        Raises:
            ValueError: a cost is not a positive number.
        """
        if not (0.0 < baseline < math.inf and 0.0 < candidate < math.inf):
            raise ValueError(f"costs {baseline} and {candidate} are not positive numbers")
        self._values.append(math.log(baseline / candidate))
        count = len(self._values)
        if count >= self._rule.max_rounds:
            return True
        return count in self._rule.looks and self.result().decision != "undecided"

    def result(self) -> Comparison:
        """What the pairs say so far."""
        count = len(self._values)
        if count < 2:
            return Comparison("undecided", math.fsum(self._values), -math.inf, math.inf, count)
        tail = (1.0 - self._rule.confidence) / len(self._rule.looks) / 2.0
        log_ratio, low, high = (_by_ranks if count >= RANKED else _by_t)(self._values, tail)
        decision: Decision = "undecided"
        if low > 0.0:
            decision = "better"
        elif high < math.log1p(self._rule.min_gain):
            decision = "not better"
        return Comparison(decision, log_ratio, low, high, count)


def _by_t(values: list[float], tail: float) -> tuple[float, float, float]:
    """Mean and interval, outside of which there is `tail` on each side."""
    mean = statistics.fmean(values)
    width = statistics.stdev(values, mean) / math.sqrt(len(values)) * _quantile(1.0 - tail, len(values) - 1)
    return mean, mean - width, mean + width


def _by_ranks(values: list[float], tail: float) -> tuple[float, float, float]:
    """Median of the means of all pairs of values, and an interval of such means; as :func:`_by_t`."""
    means = sorted((a + b) / 2.0 for a, b in combinations_with_replacement(values, 2))
    end = _critical_rank(len(values), tail)
    low, high = (means[end - 1], means[-end]) if end else (-math.inf, math.inf)
    return statistics.median(means), low, high


@lru_cache(maxsize=1024)
def _critical_rank(count: int, tail: float) -> int:
    """The largest number that the sum of the positive ranks is below with a probability of at most `tail`."""
    ways = [1, *[0] * (count * (count + 1) // 2)]  # subsets of the ranks so far, by their sum
    for rank in range(1, count + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    below = accumulate(ways)
    return sum(1 for _ in takewhile(lambda number: number <= tail * 2**count, below))


@lru_cache(maxsize=1024)
def _quantile(probability: float, freedom: int) -> float:
    """Of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
