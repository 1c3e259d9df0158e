"""The order in which the greedy search proposes mixes: a function of the finished trials alone, so it can resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product

from vllm_fl.dispatch.parameters import parse_variant

from .space import Mix, Operator, changes
from .trials import History

#: So many of the operators with the largest shares are also changed in pairs.
PAIRED = 6
#: Operators with a smaller share keep their parameters: better ones would save a part of it only.
LEAST_FOR_PARAMETERS = 0.02


def proposals(history: History) -> Iterator[Mix]:
    """What to try next, the most promising first.

    One operator after the other, by share; then the parameters of the best implementations, from value to neighbouring
    value as long as that is a gain; then again what noise left undecided; then pairs of the operators with the largest
    shares, every combination of two implementations that no trial has had.
    """
    for mix in _all(history):
        if not history.rules_out(mix):
            yield mix


def remaining(history: History) -> int:
    """How many trials the greedy search still wants, as far as is known now."""
    return sum(1 for _ in {tuple(sorted(mix.items())) for mix in proposals(history)})


def part(history: History, mix: Mix) -> float:
    """The part of the time left that a trial of `mix` should have: more where the operators' shares are larger.

    So all that change one operator alone have their turn before the time is up, and all others once there are no such.
    """
    wanted = [changes(each, history.best) for each in proposals(history)]
    first = [step for step in wanted if len(step) == 1] or wanted
    shares = {operator.name: operator.share for operator in history.space.operators}
    total = math.fsum(shares[name] for step in first for name in step)
    return math.fsum(shares[name] for name in changes(mix, history.best)) / total if total else 1.0 / max(1, len(first))


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
    yield from _parameters(history)
    undecided = [t for t in history.known if t.outcome == "undecided" and len(t.changed) == 1 and t.high > 0.0]
    for trial in sorted(undecided, key=lambda t: -t.high):
        ((name, implementation),) = trial.changed.items()
        if singles[name, implementation] < 2:
            yield {**history.best, name: implementation}
    yield from _pairs(history)


def _parameters(history: History) -> Iterator[Mix]:
    """Neighbours of the best variants; a value that has been tried, whatever the others were, is not tried again."""
    tried = set()
    for trial in history.known:
        for name, chosen in trial.changed.items():
            there_and_back = (trial.against[name], chosen), (chosen, trial.against[name])
            tried |= {(name, *step) for way in there_and_back for step in _steps(history, name, *way)}
    for operator in history.space.operators:
        if operator.share < LEAST_FOR_PARAMETERS:
            continue
        best = history.best[operator.name]
        for chosen in operator.neighbours(best):
            if all((operator.name, *step) not in tried for step in _steps(history, operator.name, best, chosen)):
                yield {**history.best, operator.name: chosen}


def _steps(history: History, name: str, before: str, after: str) -> Iterator[tuple[str, str, str]]:
    """(implementation, dimension, value) of what differs between two variants of one implementation."""
    impl_id = _id(after)
    if _id(before) == impl_id:
        operator = history.space.operator(name)
        old = operator.values(before)
        yield from ((impl_id, key, value) for key, value in operator.values(after).items() if old[key] != value)


def _pairs(history: History) -> Iterator[Mix]:
    top = history.space.operators[:PAIRED]
    mixes = [history.space.baseline, *(trial.mix for trial in history.known)]
    # The first two operators, then those with the third, and so on.
    for first, second in sorted(combinations(range(len(top)), 2), key=lambda pair: (pair[1], pair[0])):
        one, two = top[first], top[second]
        seen = {(_id(mix[one.name]), _id(mix[two.name])) for mix in mixes}
        for chosen in product(_variants(history, one), _variants(history, two)):
            if (_id(chosen[0]), _id(chosen[1])) not in seen:
                yield {**history.best, one.name: chosen[0], two.name: chosen[1]}


def _variants(history: History, operator: Operator) -> list[str]:
    """The implementations of an operator, that of the best mix with its parameters."""
    best = history.best[operator.name]
    return [best if _id(each) == _id(best) else each for each in operator.implementations]


def _id(chosen: str) -> str:
    return parse_variant(chosen)[0]
