"""What is known of a trial, how the study keeps it, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, Protocol

from vllm_fl.dispatch.parameters import parse_variant
from vllm_fl.errors import FLError

from .sequential import Decision
from .space import Mix, SearchSpace, changes

#: Why a mix cannot be used.
Reason = Literal[
    "", "crash", "hang", "out of memory", "nan", "inaccurate", "not used", "too slow", "baseline", "interrupted"
]
Outcome = Decision | Literal["failed"]


class TrialFailed(FLError, RuntimeError):
    """A mix cannot be used.

    Args:
        reason: the kind of failure.
        text: what happened.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text


class Measurer(Protocol):
    """Runs mixes: an engine of vLLM, or a model of one in a test.

    Each method raises :class:`TrialFailed` if the mix cannot be used, and is ready for another mix afterwards.
    """

    def check(self, mix: Mix) -> None:
        """Whether `mix` runs and answers as accurately as the baseline."""

    def measure(self, mix: Mix, variant: int) -> float:
        """The cost of one round of the workload under `mix`: positive, and the smaller the better.

        Rounds of one `variant`, a number from 1, have the same prompts.
        """

    def now(self) -> float:
        """The clock that the budget is of, seconds."""


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Args:
        number: its place in the study.
        mix: what was tried.
        against: the best mix at that time, which it was measured in turn with.
        outcome: what was found.
        log_ratio, low, high, rounds: as in :class:`vllm_fl.tune.sequential.Comparison`.
        costs: of each pair of rounds: of `against`, and of `mix`.
        total: logarithm of the ratio to the baseline of the study, over the steps between.
        drift: logarithm of how much slower `against` was than when it was first measured.
        seconds: how long the trial took.
        reason, text: of a failure.
    """

    number: int
    mix: Mix
    against: Mix
    outcome: Outcome
    log_ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    rounds: int = 0
    costs: Sequence[Sequence[float]] = ()
    total: float = 0.0
    drift: float = 0.0
    seconds: float = 0.0
    reason: Reason = ""
    text: str = ""

    @cached_property
    def changed(self) -> dict[str, str]:
        """What it has that `against` has not."""
        return changes(self.mix, self.against)

    def as_dict(self) -> dict[str, Any]:
        """The trial as plain data, ready for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class History:
    """The finished trials of a study and what follows from them: the best mix, and what cannot be used."""

    def __init__(self, space: SearchSpace, trials: Iterable[Trial] = ()) -> None:
        self.space = space
        self.trials: Sequence[Trial] = sorted(trials, key=lambda trial: trial.number)
        best = max((t for t in self.trials if t.outcome == "better"), key=lambda t: t.total, default=None)
        self.best: Mix = best.mix if best is not None else space.baseline
        self.best_total = best.total if best is not None else 0.0
        known = [trial for trial in self.trials if trial.reason not in ("baseline", "interrupted")]
        #: (operator, variant) that failed as the only change of a mix that worked.
        self.unusable = {next(iter(t.changed.items())) for t in known if t.outcome == "failed" and len(t.changed) == 1}
        #: Mixes that need not be tried again, as their items.
        self.tried = {tuple(sorted(t.mix.items())) for t in known if t.outcome != "undecided"}
        #: Trials that say something about their mix.
        self.known: Sequence[Trial] = known

    def rules_out(self, mix: Mix) -> bool:
        """Whether `mix` need not be tried: it is the best one, has failed or lost, or has a part that failed.

        What failed as it is by itself is not tried with other parameters either.
        """
        if mix == self.best or tuple(sorted(mix.items())) in self.tried:
            return True
        parts = {(name, part) for name, chosen in mix.items() for part in (chosen, parse_variant(chosen)[0])}
        return not self.unusable.isdisjoint(parts)
