"""The search: trial after trial until the budget is spent, then the best mix against the baseline once more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vllm_fl.errors import FLError

from .sequential import Comparison, Rule, SequentialTest
from .space import Mix
from .study import Study
from .trials import History, Measurer, Trial, TrialFailed

#: Why a search ended.
Stop = Literal["nothing left to try", "time", "trials", "interrupted"]
#: Pairs of rounds of the last comparison: a number that does not depend on what they show, so that its interval is not
#: one of a lucky stop. Fewer where they would take more than this part of the time.
CONFIRMING_ROUNDS, _LEAST_CONFIRMING_ROUNDS = 30, 6
_CONFIRMING_PART = 0.25
#: After its first look a trial may take so many times its part of the time, so that all operators have their turn.
_PARTS = 2.0
#: So many trials in a row in which the best mix so far fails mean that the machine, not a mix, is at fault.
_BASELINE_FAILURES = 3
#: Interval ends beyond it are kept as it: JSON has no infinity.
_FAR = 50.0


@dataclass(frozen=True)
class Budget:
    """When a search ends: after so many seconds of the measurer's clock, or so many trials; None is no limit."""

    seconds: float | None = None
    trials: int | None = None


@dataclass(frozen=True)
class Progress:
    """Where a search is.

    Args:
        history: all finished trials.
        seconds: since it began.
        left: seconds that it takes at most, or about, from now on; None if nothing is known yet.
    """

    history: History
    seconds: float
    left: float | None


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Args:
        mix: the best mix; the baseline where no other is certainly better.
        ratio: the baseline's cost / that of `mix`, measured anew at the end; None where that was not done, or where it
            did not confirm the trials.
        stop: why the search ended.
        history: all trials.
        rejected: a mix that the trials found better, and the last comparison did not.
        seconds: how long it took.
    """

    mix: Mix
    ratio: Comparison | None
    stop: Stop
    history: History
    rejected: Mix | None
    seconds: float


class BaselineFailedError(FLError, RuntimeError):
    """The baseline itself cannot be measured."""


def search(
    study: Study,
    measurer: Measurer,
    *,
    budget: Budget | None = None,
    rule: Rule | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Found:
    """Search until the budget is spent or nothing is left to try; Ctrl-C ends it with the best so far.

    Raises:
        BaselineFailedError: the baseline does not run, or the best mix so far has failed in several trials in a row.
    """
    return _Search(study, measurer, budget or Budget(), rule or Rule(), on_progress).run()


class _Search:
    def __init__(
        self, study: Study, measurer: Measurer, budget: Budget, rule: Rule, on_progress: Callable[[Progress], None]
    ) -> None:
        self._study, self._measurer, self._budget, self._rule = study, measurer, budget, rule
        self._on_progress = on_progress
        self._begin = measurer.now()
        self._reference: dict[tuple[tuple[str, str], ...], float] = {}
        self._round_s = 0.0
        self._variant = 0

    def run(self) -> Found:
        baseline = self._study.space.baseline
        try:
            self._measurer.check(baseline)
        except TrialFailed as error:
            raise BaselineFailedError(f"the baseline cannot be tuned: {error}") from error
        try:
            stop = self._trials()
        except KeyboardInterrupt:  # between two trials
            stop = "interrupted"
        history = self._study.history()
        mix, ratio, rejected = history.best, None, None
        if stop != "interrupted" and mix != baseline:
            try:
                ratio = self._confirm(mix, baseline)
            except KeyboardInterrupt:
                stop = "interrupted"
            else:
                if ratio is None or ratio.decision != "better":
                    mix, rejected, ratio = baseline, mix, None
        return Found(mix, ratio, stop, history, rejected, self._elapsed())

    def _trials(self) -> Stop:
        done = failures = 0
        while True:
            history = self._study.history()
            self._on_progress(Progress(history, self._elapsed(), self._left(history)))
            if self._budget.trials is not None and done >= self._budget.trials:
                return "trials"
            if self._is_over():
                return "time"
            asked = self._study.ask(history)
            if asked is None:
                return "nothing left to try"
            record = self._try(asked[0].number, asked[1], history)
            self._study.tell(asked[0], record)
            if record.reason == "interrupted":
                return "interrupted"
            done += 1
            failures = failures + 1 if record.reason == "baseline" else 0
            if failures >= _BASELINE_FAILURES:
                raise BaselineFailedError(f"the best mix so far has failed {failures} times in a row: {record.text}")

    def _try(self, number: int, mix: Mix, history: History) -> Trial:
        begin, best, test = self._measurer.now(), history.best, SequentialTest(self._rule)
        key = tuple(sorted(best.items()))
        costs: list[tuple[float, float]] = []
        failure: TrialFailed | None = None
        try:
            self._measurer.check(mix)
            self._compare(mix, best, test, costs, begin + self._allotted(history, mix))
        except TrialFailed as error:
            failure = error
        except KeyboardInterrupt:
            failure = TrialFailed("interrupted", "Ctrl-C")
        seconds = self._measurer.now() - begin
        if failure is not None:
            return Trial(number, mix, best, "failed", seconds=seconds, reason=failure.reason, text=failure.text)
        level = math.fsum(math.log(cost) for cost, _ in costs) / len(costs)
        found = test.result()
        return Trial(
            number,
            mix,
            best,
            found.decision,
            found.log_ratio,
            max(found.low, -_FAR),
            min(found.high, _FAR),
            found.rounds,
            costs,
            total=history.best_total + found.log_ratio,
            drift=level - self._reference.setdefault(key, level),
            seconds=seconds,
        )

    def _compare(
        self, mix: Mix, best: Mix, test: SequentialTest, costs: list[tuple[float, float]], until: float
    ) -> None:
        over = False
        while not over:
            begin = self._measurer.now()
            costs.append(self._pair(best, mix, len(costs) % 2 == 1))
            over = test.add(*costs[-1])
            self._round_s = self._measurer.now() - begin
            late = self._measurer.now() >= until or self._is_over()
            over = over or (len(costs) >= self._rule.first and late)

    def _pair(self, best: Mix, mix: Mix, mix_first: bool) -> tuple[float, float]:
        """The costs of a round of each, with the same prompts, which decide on the routes to experts, say.

        Callers alternate which comes first, so that a steady drift cancels.
        """
        self._variant += 1
        if mix_first:
            cost = self._measurer.measure(mix, self._variant)
            return self._measure_best(best), cost
        return self._measure_best(best), self._measurer.measure(mix, self._variant)

    def _measure_best(self, best: Mix) -> float:
        try:
            return self._measurer.measure(best, self._variant)
        except TrialFailed as error:
            raise TrialFailed("baseline", str(error)) from error

    def _confirm(self, mix: Mix, baseline: Mix) -> Comparison | None:
        rounds = self._confirming_rounds()
        test = SequentialTest(self._rule.single(rounds))
        try:
            self._measurer.check(mix)
            for number in range(rounds):
                test.add(*self._pair(baseline, mix, number % 2 == 1))
        except TrialFailed:
            return None
        return test.result()

    def _elapsed(self) -> float:
        return self._measurer.now() - self._begin

    def _is_over(self) -> bool:
        """Whether the time is up but for what the last comparison takes."""
        return self._left_for_trials() <= 0.0

    def _left_for_trials(self) -> float:
        """Seconds until the last comparison has to begin."""
        limit = math.inf if self._budget.seconds is None else self._budget.seconds
        return limit - self._elapsed() - self._round_s * self._confirming_rounds()

    def _allotted(self, history: History, mix: Mix) -> float:
        """Seconds that a trial of `mix` may take."""
        return _PARTS * self._left_for_trials() * self._study.part(history, mix)

    def _confirming_rounds(self) -> int:
        if self._budget.seconds is None or self._round_s == 0.0:
            return CONFIRMING_ROUNDS
        fitting = int(_CONFIRMING_PART * self._budget.seconds / self._round_s)
        return max(_LEAST_CONFIRMING_ROUNDS, min(CONFIRMING_ROUNDS, fitting))

    def _left(self, history: History) -> float | None:
        limit = None if self._budget.seconds is None else max(0.0, self._budget.seconds - self._elapsed())
        wanted = self._study.remaining(history)
        times = [trial.seconds for trial in history.trials]
        if wanted is None or not times:
            return limit
        guess = wanted * math.fsum(times) / len(times)
        return guess if limit is None else min(guess, limit)
