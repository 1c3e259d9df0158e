"""How a search ends, what it does with failures, and how it goes on."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from vllm_fl.dispatch.parameters import parse_variant
from vllm_fl.errors import ConfigError
from vllm_fl.tune import (
    BaselineFailedError,
    Budget,
    Dimension,
    History,
    Mix,
    Operator,
    Rule,
    SearchSpace,
    Study,
    Trial,
    TrialFailed,
    search,
    search_space,
)
from vllm_fl.tune.study import kept_shares, open_storage

SPACE = SearchSpace((Operator("norm", ("slow", "fast"), 0.3), Operator("gate", ("fast", "slow", "worst"), 0.5)))
RULE = Rule(max_rounds=6)
COSTS = {"fast": 1.0, "slow": 1.2, "worst": 2.0}


class Steady:
    """A measurer without noise: a second a round, as many calls of measure as `calls` allows before `at_end`."""

    def __init__(self, fails: tuple[str, str, str] | None = None, interrupt_at: int | None = None) -> None:
        self.fails, self.interrupt_at = fails, interrupt_at
        self.calls, self.clock = 0, 0.0
        self.slower = 1.0

    def check(self, mix: Mix) -> None:
        if self.fails is not None and mix[self.fails[0]] == self.fails[1]:
            raise TrialFailed(self.fails[2], "planted")  # type: ignore[arg-type]

    def measure(self, mix: Mix, variant: int) -> float:
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        self.clock += 1.0
        return self.slower * COSTS[mix["norm"]] * COSTS[mix["gate"]]

    def now(self) -> float:
        return self.clock


def test_operators_go_by_share_and_the_best_is_found() -> None:
    found = search(Study(SPACE, sampler="greedy"), Steady(), rule=RULE)
    assert found.stop == "nothing left to try"
    assert found.mix == {"norm": "fast", "gate": "fast"}
    assert [trial.changed for trial in found.history.trials[:3]] == [
        {"gate": "slow"},
        {"gate": "worst"},
        {"norm": "fast"},
    ]
    assert [trial.outcome for trial in found.history.trials[:3]] == ["not better", "not better", "better"]


@pytest.mark.parametrize("reason", ["crash", "hang", "nan", "out of memory", "inaccurate", "not used"])
def test_a_failure_is_a_failed_trial_with_its_reason(reason: str) -> None:
    study = Study(SPACE, sampler="greedy")
    found = search(study, Steady(("norm", "fast", reason)), rule=RULE)
    assert found.mix == SPACE.baseline
    (trial,) = [trial for trial in found.history.trials if trial.changed == {"norm": "fast"}]
    assert (trial.outcome, trial.reason, trial.text) == ("failed", reason, "planted")
    assert study.optuna.trials[trial.number].state is optuna.trial.TrialState.FAIL


def test_a_baseline_that_fails_ends_the_search() -> None:
    with pytest.raises(BaselineFailedError) as caught:
        search(Study(SPACE), Steady(("norm", "slow", "crash")))
    assert str(caught.value) == "the baseline cannot be tuned: crash: planted"


class Dying(Steady):
    """Works for the first two pairs, and never again."""

    def measure(self, mix: Mix, variant: int) -> float:
        if mix == SPACE.baseline and self.calls > 4:
            raise TrialFailed("crash", "no device")
        return super().measure(mix, variant)


def test_a_baseline_that_dies_is_not_blamed_on_the_mixes() -> None:
    study = Study(SPACE, sampler="greedy")
    with pytest.raises(BaselineFailedError) as caught:
        search(study, Dying(), rule=RULE)
    assert str(caught.value) == "the best mix so far has failed 3 times in a row: crash: no device"
    assert study.history().unusable == set()


@pytest.mark.parametrize("call", [1, 20])
def test_ctrl_c_ends_with_the_best_so_far(call: int) -> None:
    study = Study(SPACE, sampler="greedy")
    found = search(study, Steady(interrupt_at=call), rule=RULE)
    assert found.stop == "interrupted"
    assert found.ratio is None
    assert found.mix == found.history.best
    again = search(study, Steady(), rule=RULE)
    assert again.mix == {"norm": "fast", "gate": "fast"}


def test_the_time_holds_the_last_comparison_too() -> None:
    measurer = Steady()
    found = search(Study(SPACE, sampler="tpe"), measurer, budget=Budget(seconds=60.0), rule=RULE)
    assert found.stop in ("time", "nothing left to try")
    assert found.seconds <= 60.0 + 2 * RULE.first


class Listed(Steady):
    """Keeps what is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[int, Mix]] = []

    def measure(self, mix: Mix, variant: int) -> float:
        self.rounds.append((variant, mix))
        return super().measure(mix, variant)


def test_both_rounds_of_a_pair_have_the_prompts_that_no_other_pair_has() -> None:
    measurer = Listed()
    found = search(Study(SPACE, sampler="greedy"), measurer, rule=RULE, budget=Budget(trials=3))
    variants, mixes = zip(*measurer.rounds, strict=True)
    assert variants[::2] == variants[1::2] == tuple(range(1, len(variants) // 2 + 1))
    assert all(one != other for one, other in zip(mixes[::2], mixes[1::2], strict=True))
    first = found.history.trials[0]
    assert first.costs == [[1.2, 1.2 * 1.2]] * first.rounds


class Noisy(Steady):
    """Nothing is certain."""

    def measure(self, mix: Mix, variant: int) -> float:
        self.calls, self.clock = self.calls + 1, self.clock + 1.0
        return 2.0 if self.calls % 3 else 1.0


def test_what_stays_uncertain_leaves_time_for_the_others() -> None:
    names = [f"operator{number}" for number in range(8)]
    space = SearchSpace(tuple(Operator(name, ("fast", "slow"), 0.1) for name in names))
    history = search(Study(space, sampler="greedy"), Noisy(), budget=Budget(seconds=400.0)).history
    assert [next(iter(trial.changed)) for trial in history.trials[:8]] == names
    assert history.trials[0].rounds < Rule().max_rounds


def test_larger_shares_have_more_of_the_time() -> None:
    shares = {"large": 0.6, "small": 0.1}
    space = SearchSpace(tuple(Operator(name, ("fast", "slow"), share) for name, share in shares.items()))
    history = search(Study(space, sampler="greedy"), Noisy(), budget=Budget(seconds=120.0)).history
    large, small = history.trials[:2]
    assert (set(large.changed), set(small.changed)) == ({"large"}, {"small"})
    assert large.rounds > 2 * small.rounds


class Fading(Steady):
    """What was faster in three trials is not in the last comparison."""

    def measure(self, mix: Mix, variant: int) -> float:
        fast = super().measure(mix, variant)
        return 1.3 if self.calls > 24 and mix["norm"] == "fast" else fast


def test_a_mix_that_the_last_comparison_does_not_confirm_is_not_taken() -> None:
    found = search(Study(SPACE, sampler="greedy"), Fading(), rule=RULE, budget=Budget(trials=3))
    assert found.history.best == {"norm": "fast", "gate": "fast"}
    assert (found.mix, found.rejected, found.ratio) == (SPACE.baseline, found.history.best, None)


class Slowing(Steady):
    def check(self, mix: Mix) -> None:
        self.slower *= 1.1


def test_a_machine_that_slows_down_is_seen_and_misleads_nobody() -> None:
    found = search(Study(SPACE, sampler="greedy"), Slowing(), rule=RULE)
    assert found.mix == {"norm": "fast", "gate": "fast"}
    assert [round(trial.drift, 3) for trial in found.history.trials[:3]] == [0.0, 0.095, 0.191]


def test_a_study_that_exists_is_not_gone_on_with_by_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    search(Study(SPACE, storage=url, sampler="greedy"), Steady(), rule=RULE, budget=Budget(trials=2))
    with pytest.raises(ConfigError) as caught:
        Study(SPACE, storage=url)
    assert str(caught.value) == (
        f"the study 'vllm-fl tune' exists in {url}; pass --resume to go on with it, or remove it"
    )
    other = SearchSpace((Operator("norm", ("slow", "fast"), 0.3),))
    with pytest.raises(ConfigError) as caught:
        Study(other, storage=url, resume=True)
    assert str(caught.value) == (
        "the study 'vllm-fl tune' is one of something else: space is"
        f" {SPACE.fingerprint()!r} there and {other.fingerprint()!r} here; give the same again, or begin a new study"
    )


def test_a_study_keeps_its_shares(tmp_path: Path) -> None:
    """Another profile would have slightly others, and perhaps another operator above the least share."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert kept_shares(url, "vllm-fl tune") is None
    Study(SPACE, storage=url)
    assert kept_shares(url, "vllm-fl tune") == {"gate": 0.5, "norm": 0.3}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("study.db", "Could not parse SQLAlchemy URL from given URL string"),
        ("sqlite:////nowhere/study.db", "(sqlite3.OperationalError) unable to open database file"),
    ],
)
def test_a_storage_that_cannot_be_opened(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(url)
    assert str(caught.value) == (
        f"the storage {url!r} cannot be opened ({reason}); give a URL such as sqlite:///study.db"
    )


BLOCKS = Dimension("block", ("32", "64", "128", "256"), "64")
MODE = Dimension("mode", ("auto", "narrow", "wide"), "auto")
TUNABLE = SearchSpace(
    (
        Operator("norm", ("slow", "fast(block=128)"), 0.3, {"fast": (BLOCKS, MODE)}),
        Operator("gate", ("fast", "slow"), 0.5),
        Operator("tiny", ("fast",), 0.01, {"fast": (BLOCKS,)}),
    )
)


class Tunable(Steady):
    """``fast`` is the faster, the larger its block; its mode is of no use."""

    def measure(self, mix: Mix, variant: int) -> float:
        impl_id, values = parse_variant(mix["norm"])
        block = int(values.get("block", "64")) if impl_id == "fast" else 64
        return super().measure({**mix, "norm": impl_id}, variant) * (1.0 - block / 1000.0)


def test_greedy_goes_from_value_to_value_of_the_best_implementation_as_long_as_it_gains() -> None:
    found = search(Study(TUNABLE, sampler="greedy"), Tunable(), rule=RULE)
    assert found.mix == {"norm": "fast(block=256)", "gate": "fast", "tiny": "fast"}
    assert [trial.changed for trial in found.history.trials[:6]] == [
        {"gate": "slow"},
        {"norm": "fast(block=128)"},
        {"norm": "fast(block=256)"},
        {"norm": "fast(block=256, mode=narrow)"},
        {"norm": "fast(block=256, mode=wide)"},
        {"gate": "slow"},  # now with the fast one
    ]
    assert {operator for trial in found.history.trials for operator in trial.changed} == {"norm", "gate"}


def test_a_value_that_was_left_for_a_better_one_is_not_tried_again() -> None:
    space = SearchSpace((Operator("norm", ("fast",), 0.3, {"fast": (BLOCKS,)}), Operator("gate", ("fast",), 0.5)))
    found = search(Study(space, sampler="greedy"), Tunable(), rule=RULE)
    assert [trial.changed["norm"] for trial in found.history.trials] == ["fast(block=128)", "fast(block=256)"]


def test_parameters_are_dimensions_of_optunas_samplers() -> None:
    study = Study(TUNABLE, sampler="tpe")
    found = search(study, Tunable(), rule=RULE, budget=Budget(trials=12))
    assert set(study.optuna.trials[-1].params) == {
        *("norm", "norm fast block", "norm fast mode", "gate", "tiny", "tiny fast block"),
    }
    assert parse_variant(found.mix["norm"])[0] == "fast"
    assert all(TUNABLE.mix(TUNABLE.chosen(trial.mix)) == trial.mix for trial in found.history.trials)


def test_what_fails_as_it_is_is_not_tried_with_other_parameters() -> None:
    space = SearchSpace((Operator("norm", ("slow", "fast"), 0.3, {"fast": (BLOCKS,)}),))
    history = History(space, [Trial(1, {"norm": "fast"}, space.baseline, "failed", reason="crash")])
    assert history.rules_out({"norm": "fast(block=128)"})
    lost = History(space, [Trial(1, {"norm": "fast(block=32)"}, space.baseline, "failed", reason="crash")])
    assert not lost.rules_out({"norm": "fast(block=128)"})


def test_the_sizes_and_fingerprints_of_spaces_have_the_parameters() -> None:
    assert TUNABLE.size == (1 + 4 * 3) * 2 * 4
    other = SearchSpace((Operator("norm", ("slow", "fast"), 0.3, {"fast": (BLOCKS,)}),))
    without = SearchSpace((Operator("norm", ("slow", "fast"), 0.3),))
    assert other.fingerprint() != without.fingerprint()


def test_the_space_has_what_the_profile_saw_and_a_choice() -> None:
    shares = {"norm": 0.1, "gate": 0.4, "alone": 0.3, "tiny": 0.001, "unknown": 0.1}
    accepted = {"norm": ["a", "b"], "gate": ["a", "b", "c"], "alone": ["a"], "tiny": ["a", "b"], "unseen": ["a", "b"]}
    space = search_space(shares, accepted, min_share=0.002)
    assert [operator.name for operator in space.operators] == ["gate", "norm"]
    assert (space.baseline, space.size) == ({"gate": "a", "norm": "a"}, 6)


def test_one_implementation_with_parameters_is_a_choice() -> None:
    space = search_space({"norm": 0.1}, {"norm": ["a"]}, dimensions={"norm": {"a": (BLOCKS,)}})
    assert [operator.size for operator in space.operators] == [4]
