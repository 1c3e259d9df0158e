"""The whole search on the planted model of costs: does it find the optimum, and never the inaccurate one."""

from __future__ import annotations

import pytest
from planted_costs import PlantedCosts

from vllm_fl.tune import Budget, Found, Sampler, Study, search


def tuned(seed: int, sampler: Sampler, trials: int) -> tuple[PlantedCosts, Found]:
    costs = PlantedCosts(seed)
    study = Study(costs.space, sampler=sampler, seed=seed)
    return costs, search(study, costs, budget=Budget(trials=trials))


def optima(seeds: range) -> int:
    found = 0
    for seed in seeds:
        costs, result = tuned(seed, "auto", 60)
        assert len(result.history.trials) <= 60
        assert result.mix[costs.inaccurate[0]] != costs.inaccurate[1]
        assert result.mix[costs.crashing[0]] != costs.crashing[1]
        found += result.mix == costs.optimum()
    return found


def test_the_optimum_is_found_in_60_trials() -> None:
    assert optima(range(20)) >= 19


@pytest.mark.slow
def test_the_optimum_is_found_in_95_of_100_seeds() -> None:
    assert optima(range(100)) >= 95


@pytest.mark.parametrize(("sampler", "trials"), [("tpe", 25), ("gp", 14)])
def test_samplers_of_optuna_gain_and_never_take_the_inaccurate_one(sampler: Sampler, trials: int) -> None:
    costs, result = tuned(3, sampler, trials)
    assert result.mix[costs.inaccurate[0]] != costs.inaccurate[1]
    assert costs.true_cost(result.mix) < 0.0
    assert result.ratio is not None
    assert result.ratio.low > 0.0


def test_what_cannot_be_used_is_tried_once() -> None:
    costs, _ = tuned(0, "greedy", 60)
    assert costs.checked_unusable == 2


def test_importances_need_enough_trials() -> None:
    costs = PlantedCosts(0)
    study = Study(costs.space, sampler="greedy")
    search(study, costs, budget=Budget(trials=8))
    assert study.importances() == {}
    search(study, costs, budget=Budget(trials=40))
    found = study.importances()
    assert found.keys() == costs.cost.keys()
    assert sum(found.values()) == pytest.approx(1.0)


def test_the_last_comparison_holds_the_true_ratio() -> None:
    """With confidence of 95 % in each of 20 searches; 16 hits or fewer have a probability of 0.3 %."""
    hits = 0
    for seed in range(20):
        costs, result = tuned(seed, "greedy", 12)
        if result.ratio is None:
            hits += 1
            continue
        hits += result.ratio.low <= -costs.true_cost(result.mix) <= result.ratio.high
    assert hits >= 17
