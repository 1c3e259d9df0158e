"""What is tuned for: the cost of one round of the workload, from the times of its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .trials import TrialFailed

#: throughput: tokens a second; ttft: time to the first token; tpot: time of each further token; goodput: requests a
#: second that keep limits of both.
Objective = Literal["throughput", "ttft", "tpot", "goodput"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "ttft", "tpot", "goodput")


class RequestTimes(NamedTuple):
    """Of one request: seconds to the first token, seconds a further token, number of tokens."""

    ttft_s: float
    tpot_s: float
    tokens: int


class Round(NamedTuple):
    """One round of the workload: its wall time in seconds, the tokens of all answers, and its requests.

    There are no times of requests where the objective needs none.
    """

    wall_s: float
    tokens: int
    requests: Sequence[RequestTimes]


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count for goodput, seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1


def cost(objective: Objective, measured: Round, limits: Limits) -> float:
    """The cost of a round: positive, and the smaller the better.

    Raises:
        TrialFailed: the objective is goodput and no request has kept the limits.
    """
    if objective == "throughput":
        return measured.wall_s / measured.tokens
    if objective == "ttft":
        return math.fsum(r.ttft_s for r in measured.requests) / len(measured.requests)
    if objective == "tpot":
        return math.fsum(r.tpot_s for r in measured.requests) / len(measured.requests)
    good = sum(r.ttft_s <= limits.ttft_s and r.tpot_s <= limits.tpot_s for r in measured.requests)
    if not good:
        text = f"no request had {limits.ttft_s:g} s to the first token and {limits.tpot_s:g} s a token"
        raise TrialFailed("too slow", text)
    return measured.wall_s / good
