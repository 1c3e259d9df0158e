"""The sequential test, the accuracy gate, and the cost of a round."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from vllm_fl.tune import Answer, Limits, Objective, Rule, SequentialTest, Tolerance, TrialFailed, judge
from vllm_fl.tune.objectives import RequestTimes, Round, cost
from vllm_fl.tune.sequential import Comparison, _by_ranks, _critical_rank


def compared(gain: float, seed: int, rule: Rule, noise: float = 0.03) -> Comparison:
    rng, test, over = random.Random(seed), SequentialTest(rule), False
    while not over:
        over = test.add(math.exp(rng.gauss(0, noise)), math.exp(rng.gauss(0, noise) - math.log1p(gain)))
    return test.result()


def test_an_equal_candidate_is_called_better_in_less_than_the_allowed_part() -> None:
    """2.5 % on this side; 1000 tests with that rate have 40 or more with a probability of 0.3 %."""
    better = sum(compared(0.0, seed, Rule()).decision == "better" for seed in range(1000))
    assert better < 40


def test_intervals_hold_the_truth_whenever_the_test_stops() -> None:
    truth = math.log1p(0.02)
    outside = sum(not c.low <= truth <= c.high for c in (compared(0.02, seed, Rule()) for seed in range(1000)))
    assert outside < 70


@pytest.mark.parametrize(("gain", "decision", "rounds"), [(-0.3, "not better", 6), (0.5, "better", 6)])
def test_a_clear_candidate_needs_few_rounds(gain: float, decision: str, rounds: int) -> None:
    results = [compared(gain, seed, Rule()) for seed in range(20)]
    assert {result.decision for result in results} == {decision}
    assert max(result.rounds for result in results) <= rounds


def test_a_gain_too_small_to_have_is_given_up() -> None:
    result = compared(0.001, 0, Rule(min_gain=0.06))
    assert (result.decision, result.rounds < 40) == ("not better", True)


def test_outliers_of_a_busy_machine_do_not_hide_a_gain() -> None:
    """One round in eight takes twice as long, whichever of the two it is. A t test finds the gain in 15 of 40."""
    found = []
    for seed in range(40):
        rng, test, over = random.Random(seed), SequentialTest(Rule()), False
        while not over:
            costs = (rng.choice((*[1.0] * 7, 2.0)) * math.exp(rng.gauss(0, 0.01)) for _ in range(2))
            over = test.add(next(costs) * 1.05, next(costs))
        found.append(test.result().decision)
    assert found.count("better") >= 34


def test_ranks_are_those_of_the_tables() -> None:
    """Wilcoxon's critical values, Hollander and Wolfe, Nonparametric Statistical Methods, table A.4."""
    values = [0.01 * (2 * i - 25) for i in range(25)]
    _, low, high = _by_ranks(values, 0.025)
    assert (_critical_rank(10, 0.025), _critical_rank(25, 0.025)) == (9, 90)
    assert low < statistics.fmean(values) < high


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_costs_are_positive_numbers(bad: float) -> None:
    with pytest.raises(ValueError) as caught:
        SequentialTest(Rule()).add(1.0, bad)
    assert str(caught.value) == f"costs 1.0 and {bad} are not positive numbers"


def test_looks_end_with_the_last_round() -> None:
    assert Rule(max_rounds=40).looks == (4, 6, 10, 16, 26, 40)
    assert Rule().single(30).looks == (30,)


def answer(*pairs: tuple[int, dict[int, float]]) -> list[Answer]:
    return [Answer([token for token, _ in pairs], [likely for _, likely in pairs])]


EXPECTED = answer((7, {7: -0.1, 8: -0.3, 9: -4.0}), (5, {5: -0.5, 6: -1.0}))


@pytest.mark.parametrize(
    "candidate",
    [
        EXPECTED,
        answer((7, {7: -0.15, 8: -0.3}), (5, {5: -0.45})),
        answer((8, {8: -0.2, 7: -0.21}), (1, {1: -0.1})),  # a tie; what follows is another text
    ],
)
def test_the_gate_lets_rounding_pass(candidate: list[Answer]) -> None:
    judge(EXPECTED, candidate, Tolerance())


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (
            answer((9, {9: -0.1}), (5, {5: -0.5})),
            "inaccurate: request 0, token 0: 9 instead of 7, whose log-probability is 3.9 above,"
            " more than a tie of 0.5",
        ),
        (
            answer((1, {1: -0.1}), (5, {5: -0.5})),
            "inaccurate: request 0, token 0: 1 instead of 7, whose log-probability is 3.9 above,"
            " more than a tie of 0.5",
        ),
        (
            answer((7, {7: -0.4}), (5, {5: -0.9})),
            "inaccurate: log-probabilities differ by 0.35 in the mean of 2 tokens, more than 0.1",
        ),
        (
            answer((7, {7: math.nan}), (5, {5: -0.5})),
            "nan: request 0, token 0: a log-probability is not a number",
        ),
    ],
)
def test_the_gate_says_what_is_off(candidate: list[Answer], message: str) -> None:
    with pytest.raises(TrialFailed) as caught:
        judge(EXPECTED, candidate, Tolerance())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("objective", "expected"), [("throughput", 0.1), ("ttft", 0.6), ("tpot", 0.05), ("goodput", 2.0)]
)
def test_the_cost_of_a_round(objective: Objective, expected: float) -> None:
    measured = Round(2.0, 20, [RequestTimes(0.2, 0.02, 10), RequestTimes(1.0, 0.08, 10)])
    assert cost(objective, measured, Limits(0.5, 0.05)) == pytest.approx(expected)


def test_goodput_without_a_good_request() -> None:
    with pytest.raises(TrialFailed) as caught:
        cost("goodput", Round(2.0, 20, [RequestTimes(2.0, 0.02, 10)]), Limits(0.5, 0.05))
    assert str(caught.value) == "too slow: no request had 0.5 s to the first token and 0.05 s a token"
