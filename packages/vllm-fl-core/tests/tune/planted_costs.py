"""A planted model of costs: 12 operators with 3 implementations, on a simulated clock with noise of 3 %.

Two pairs interact: of one, each change alone is a loss and both together are a gain; of the other, each change alone is
a gain and both together are a loss. One implementation would be the fastest of its operator and is inaccurate, one
crashes. The best implementation of one operator has a parameter, whose optimum is one or two values from its default.
The clock drifts by 20 % in the course of a search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from vllm_fl.dispatch.parameters import parse_variant, variant
from vllm_fl.tune.space import Dimension, Mix, Operator, SearchSpace
from vllm_fl.tune.trials import TrialFailed

OPERATORS, NOISE = 12, 0.03
ROUND_S = 1.0
BLOCK = Dimension("block", ("32", "64", "128", "256", "512"), "128")
STEP = 0.03  #: cost of a value for each step to the optimum


class PlantedCosts:
    """A measurer; everything about it follows from `seed`."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._noise = random.Random(seed + 1_000_000)
        names = [f"operator{i:02}" for i in range(OPERATORS)]
        shares = sorted((rng.uniform(0.03, 0.18) for _ in names), reverse=True)
        order = list(range(OPERATORS))
        top, rest = order[:4], order[4:]
        rng.shuffle(top)
        rng.shuffle(rest)
        self.cost = {name: {"a": 0.0, "b": rng.uniform(0.03, 0.08), "c": rng.uniform(0.03, 0.08)} for name in names}
        for index in rest[:6]:  # the others are best as they are
            self.cost[names[index]][rng.choice("bc")] = -rng.uniform(0.03, 0.08)
        one, two, three, four = (names[index] for index in top)
        self.cost[one]["b"], self.cost[two]["b"] = 0.03, 0.03
        self.cost[three]["b"], self.cost[four]["b"] = -0.05, -0.09
        self.extra = {(one, two): -0.14, (three, four): 0.09}
        self.inaccurate, self.crashing = (names[rest[6]], "b"), (names[rest[7]], "c")
        self.cost[self.inaccurate[0]]["b"] = -0.25
        self.tuned = names[rest[0]], min("bc", key=self.cost[names[rest[0]]].__getitem__)
        self.best_block = rng.choice([value for value in BLOCK.values if value != BLOCK.default])
        dimensions = {self.tuned[0]: {self.tuned[1]: (BLOCK,)}}
        self.space = SearchSpace(
            tuple(
                Operator(n, ("a", "b", "c"), share, dimensions.get(n, {}))
                for n, share in zip(names, shares, strict=True)
            )
        )
        self.now_s = 0.0
        self.checked_unusable = 0

    def true_cost(self, mix: Mix) -> float:
        """Logarithm of the cost, without noise."""
        cost = math.fsum(self.cost[name][parse_variant(chosen)[0]] for name, chosen in mix.items())
        name, impl_id = self.tuned
        chosen_id, values = parse_variant(mix[name])
        if chosen_id == impl_id:
            cost += STEP * (self._steps(values.get("block", BLOCK.default)) - self._steps(BLOCK.default))
        return cost + math.fsum(e for (x, y), e in self.extra.items() if mix[x] == mix[y] == "b")

    def optimum(self) -> Mapping[str, str]:
        """The best mix of those that can be used: operators that interact are judged together."""
        unusable = {self.inaccurate, self.crashing}
        usable = {n: [c for c in costs if (n, c) not in unusable] for n, costs in self.cost.items()}
        best = {name: min(usable[name], key=self.cost[name].__getitem__) for name in self.cost}
        for x, y in self.extra:
            candidates = [{**best, x: p, y: q} for p in usable[x] for q in usable[y]]
            best = min(candidates, key=self.true_cost)
        name, impl_id = self.tuned
        return {**best, name: variant(impl_id, {"block": self.best_block})}

    def _steps(self, block: str) -> int:
        return abs(BLOCK.values.index(block) - BLOCK.values.index(self.best_block))

    def check(self, mix: Mix) -> None:
        self.now_s += ROUND_S
        if mix[self.crashing[0]] == self.crashing[1]:
            self.checked_unusable += 1
            raise TrialFailed("crash", "planted")
        if mix[self.inaccurate[0]] == self.inaccurate[1]:
            self.checked_unusable += 1
            raise TrialFailed("inaccurate", "planted")

    def measure(self, mix: Mix, variant: int) -> float:
        drift = 0.2 * math.sin(self.now_s / 1000.0)
        cost = ROUND_S * math.exp(self.true_cost(mix) + drift + self._noise.gauss(0.0, NOISE))
        self.now_s += cost
        return cost

    def now(self) -> float:
        return self.now_s
