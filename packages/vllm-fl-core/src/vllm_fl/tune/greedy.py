"""The order in which the greedy search proposes mixes: a function of the finished trials alone, so it can resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from .space import Mix
from .trials import History

#: So many of the operators with the largest shares are also changed in pairs.
PAIRED = 6


def proposals(history: History) -> Iterator[Mix]:
    """What to try next, the most promising first.

    One operator after the other, by share; then again those that noise left undecided; then pairs of the operators
    with the largest shares, every combination of two implementations that no trial has had.
    """
    for mix in _all(history):
        if not history.rules_out(mix):
            yield mix


def remaining(history: History) -> int:
    """How many trials the greedy search still wants, as far as is known now."""
    return sum(1 for _ in {tuple(sorted(mix.items())) for mix in proposals(history)})


def _all(history: History) -> Iterator[Mix]:
    singles = dict.fromkeys(history.space.baseline.items(), 1)
    for trial in history.known:
        if len(trial.changed) == 1:
            item = next(iter(trial.changed.items()))
            singles[item] = singles.get(item, 0) + 1
    for operator in history.space.operators:
        for implementation in operator.implementations:
            if (operator.name, implementation) not in singles:
                yield {**history.best, operator.name: implementation}
    undecided = [t for t in history.known if t.outcome == "undecided" and len(t.changed) == 1 and t.high > 0.0]
    for trial in sorted(undecided, key=lambda t: -t.high):
        ((name, implementation),) = trial.changed.items()
        if singles[name, implementation] < 2:
            yield {**history.best, name: implementation}
    yield from _pairs(history)


def _pairs(history: History) -> Iterator[Mix]:
    top = history.space.operators[:PAIRED]
    mixes = [history.space.baseline, *(trial.mix for trial in history.known)]
    # The first two operators, then those with the third, and so on.
    for first, second in sorted(combinations(range(len(top)), 2), key=lambda pair: (pair[1], pair[0])):
        one, two = top[first], top[second]
        seen = {(mix[one.name], mix[two.name]) for mix in mixes}
        for chosen in product(one.implementations, two.implementations):
            if chosen not in seen:
                yield {**history.best, one.name: chosen[0], two.name: chosen[1]}
