"""The accuracy gate: whether a candidate answers as the baseline does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .trials import TrialFailed


@dataclass(frozen=True)
class Answer:
    """What a model answered one request with, greedily.

    Args:
        tokens: the tokens.
        likely: for each of them the most likely tokens and their log-probabilities, the chosen one among them.
    """

    tokens: Sequence[int]
    likely: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class Tolerance:
    """How far a candidate may be off; another order of summation alone moves log-probabilities.

    Args:
        mean: mean difference of the log-probabilities of the tokens that both have chosen, nats.
        tie: a token may be another one where the baseline's own log-probabilities of the two are this close, nats. One
            that is not among its likely tokens counts as the least likely of them.
    """

    mean: float = 0.1
    tie: float = 0.5


def judge(baseline: Sequence[Answer], candidate: Sequence[Answer], tolerance: Tolerance) -> list[float]:
    """Compare answers to the same requests, each up to the first token that is not the same.

    Returns:
        How far the log-probabilities of the tokens that both have chosen are apart, nats.

    Raises:
        TrialFailed: "nan" or "inaccurate", with the request and the position.
    """
    found = [
        each
        for request, (ours, theirs) in enumerate(zip(baseline, candidate, strict=True))
        for each in _differences(request, ours, theirs, tolerance)
    ]
    mean = math.fsum(found) / len(found) if found else 0.0
    if mean > tolerance.mean:
        text = f"log-probabilities differ by {mean:.3g} in the mean of {len(found)} tokens"
        raise TrialFailed("inaccurate", f"{text}, more than {tolerance.mean:g}")
    return found


def _differences(request: int, ours: Answer, theirs: Answer, tolerance: Tolerance) -> list[float]:
    found = []
    for position, (token, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        expected, got = ours.likely[position], theirs.likely[position]
        for whose, values in (("", got.values()), (" of the baseline", expected.values())):
            if any(math.isnan(value) for value in values):
                text = f"request {request}, token {position}: a log-probability{whose} is not a number"
                raise TrialFailed("nan", text)
        if token != other:
            gap = expected[token] - expected.get(other, min(expected.values()))
            if gap > tolerance.tie:
                text = f"request {request}, token {position}: {other} instead of {token}, whose log-probability is"
                raise TrialFailed("inaccurate", f"{text} {gap:.3g} above, more than a tie of {tolerance.tie:g}")
            break
        found.append(abs(expected[token] - got[token]))
    return found
