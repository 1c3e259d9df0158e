"""The result of tuning: what was found, as data, as a policy file, and as a page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vllm_fl.config import CONFIG_ENV
from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch.parameters import nested
from vllm_fl.policies import to_file
from vllm_fl.version import __version__

from .search import Found
from .space import Mix, SearchSpace, changes
from .table import Entry
from .trials import Trial

#: A search in which the best mix itself slowed down or sped up by more than this is one of an unsteady machine.
DRIFT = 0.1


class Interval(NamedTuple):
    """A ratio and its confidence interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class TuneReport:
    """What came out of tuning.

    Args:
        model: name or directory of the model.
        objective: what was tuned for.
        workload: what the engine had to do.
        confidence: of the intervals.
        space: what was searched.
        found: the best mix, its ratio and all trials.
        policy: the policy that selects it.
        importances: operator to how much its implementation and parameters matter, between 0 and 1.
        key: what the result holds for.
        engine_starts: number of engines that were needed.
        left_to_vllm: layers that compute otherwise in a new engine than where the ratio was measured.
    """

    model: str
    objective: str
    workload: str
    confidence: float
    space: SearchSpace
    found: Found
    policy: SelectionPolicy
    importances: Mapping[str, float]
    key: Mapping[str, Any]
    engine_starts: int
    left_to_vllm: tuple[str, ...] = ()

    @property
    def changed(self) -> dict[str, str]:
        """Operator to variant of an implementation, where it is another one than the baseline's."""
        return changes(self.found.mix, self.space.baseline)

    @property
    def ratio(self) -> Interval | None:
        """Cost of the baseline / cost of the best mix, measured at the end; None as in :class:`Found`."""
        found = self.found.ratio
        return Interval(*map(math.exp, (found.log_ratio, found.low, found.high))) if found is not None else None

    @property
    def drift(self) -> float:
        """The largest change of speed of a mix between two trials, as a part of it."""
        return max((abs(math.expm1(trial.drift)) for trial in self.found.history.trials), default=0.0)

    @property
    def remarks(self) -> list[str]:
        """What the reader should know about the result, in sentences."""
        said = []
        if self.found.rejected is not None:
            said.append("The trials found a better mix that the last comparison did not confirm: the baseline stays.")
        if self.found.stop == "interrupted" and self.changed:
            said.append("Interrupted: the best mix so far was not compared with the baseline again.")
        if self.drift > DRIFT:
            said.append(
                f"The machine's speed changed by up to {self.drift:.0%} between trials; within a trial that cancels."
            )
        if self.left_to_vllm and self.changed:
            layers = ", ".join(self.left_to_vllm)
            said.append(f"In a new engine layers of vLLM's own serve {layers}; the ratio was measured with ours.")
        return said

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return {
            "model": self.model,
            "objective": self.objective,
            "workload": self.workload,
            "key": dict(self.key),
            "baseline": dict(self.space.baseline),
            "mix": dict(self.found.mix),
            "changed": self.changed,
            "ratio": self.ratio._asdict() if self.ratio is not None else None,
            "confidence": self.confidence,
            "stop": self.found.stop,
            "seconds": self.found.seconds,
            "engine_starts": self.engine_starts,
            "remarks": self.remarks,
            "importances": dict(self.importances),
            "shares": {operator.name: operator.share for operator in self.space.operators},
            "trials": [{**trial.as_dict(), "changed": trial.changed} for trial in self.found.history.trials],
        }

    def entry(self) -> Entry:
        """What the table keeps: orders and parameters of the operators that were searched, and the ratio.

        Raises:
            ValueError: there is no ratio.
        """
        if self.ratio is None:
            raise ValueError("what was not confirmed is not kept")
        searched = self.space.baseline
        return Entry(
            self.key,
            {op: list(order) for op, order in self.policy.per_op_order if op in searched},
            self.ratio.ratio,
            nested((path, text) for path, text in self.policy.parameters if path.operator in searched),
        )

    def policy_file(self) -> str:
        """A file for ``VLLM_FL_CONFIG`` that selects the best mix: the user's present file with the policy's keys."""
        path = os.environ.get(CONFIG_ENV)
        own = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8")) if path else None
        interval = self.ratio
        head = f"# {self.model}, {self.objective}, {self.workload}; made by vllm-fl tune {__version__}."
        if interval is not None:
            head += f"\n# Ratio to the baseline {interval.ratio:.3f} ({interval.low:.3f} to {interval.high:.3f})."
        return f"{head}\n{yaml.safe_dump({**(own or {}), **to_file(self.policy)}, sort_keys=False)}"

    def page(self) -> str:
        """The report as a page of HTML that needs nothing else: no network, no script."""
        from jinja2 import Environment

        template = files("vllm_fl.tune").joinpath("page.html.j2").read_text(encoding="utf-8")
        trials = self.found.history.trials
        return (
            Environment(autoescape=True, trim_blocks=True)
            .from_string(template)
            .render(
                report=self,
                rows=[(trial, text_of(trial.changed), describe(trial)) for trial in trials],
                chart=_chart(trials),
                width=_WIDTH,
                height=_HEIGHT,
                version=__version__,
            )
        )


def text_of(changed: Mix) -> str:
    """``operator=implementation, ...``"""
    return ", ".join(f"{operator}={implementation}" for operator, implementation in sorted(changed.items()))


def describe(trial: Trial) -> str:
    """What came out of a trial, in words."""
    if trial.outcome == "failed":
        return f"{trial.reason}: {trial.text}"
    values = (trial.log_ratio, trial.low, trial.high)
    ratio, low, high = (math.exp(value) for value in values)
    return f"{trial.outcome}, x{ratio:.3f} ({low:.3f} to {high:.3f}) in {trial.rounds} rounds"


_WIDTH, _HEIGHT, _MARGIN = 900.0, 220.0, 12.0
_COLOURS = {"better": "#1d8a7d", "not better": "#b3572f", "undecided": "#8a6d1d", "failed": "#6b7580"}


class Mark(NamedTuple):
    """A trial in the chart of the history: a point, the ends of its interval, and what the pointer shows."""

    x: float
    y: float
    low: float
    high: float
    colour: str
    title: str


def _chart(trials: Any) -> list[Mark]:
    """The ratio of each trial to the mix it was measured against, over the trials; one is the middle."""
    widest = max((abs(t.log_ratio) for t in trials), default=0.0) * 1.3 or 1.0
    step = (_WIDTH - 2 * _MARGIN) / max(1, len(trials) - 1)

    def place(value: float) -> float:
        return _HEIGHT / 2 - max(-widest, min(widest, value)) / widest * (_HEIGHT / 2 - _MARGIN)

    return [
        Mark(
            _MARGIN + index * step,
            place(t.log_ratio),
            place(t.low),
            place(t.high),
            _COLOURS[t.outcome],
            f"{t.number}: {text_of(t.changed)}: {describe(t)}",
        )
        for index, t in enumerate(trials)
    ]
