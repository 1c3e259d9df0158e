"""The result of a profile: shares of the time by operator and implementation, and what else took the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from .coverage import IMPLEMENTATIONS, Coverage
from .providers import Provider
from .timeline import MODEL, OUTSIDE, Owner, Timeline

#: What the shares are of: the time that the device computed, or that the workers' threads ran, waiting included.
Clock = Literal["device", "cpu"]

_NAMES = {"compiled": "compiled code of inductor", "model": "rest of the model", "outside": "outside of the model"}
_ATTENTION = ("vllm::unified_attention", "vllm::unified_mla_attention")


@dataclass(frozen=True)
class Row:
    """One line of the share table.

    Args:
        operator: the operator of the catalogue; empty for anything else.
        implementation: its implementation, or what else took the time.
        provider: who provides the kernels on the device; on the CPU what sort of code it is.
        calls: number of calls, or of launches.
        time_us: microseconds, over all ranks.
        share: of the whole, between 0 and 1.
    """

    operator: str
    implementation: str
    provider: str
    calls: int
    time_us: float
    share: float


@dataclass(frozen=True)
class ProfileReport:
    """Where the time of a run went.

    Args:
        model: name or directory of the model.
        policy: the policy, as the user named it.
        workload: what the engine had to do.
        clock: what the shares are of: the device's time where there is one, else that of the workers' threads.
        wall_s: from the first request to the last answer, under the profiler, seconds.
        output_tokens: number of tokens in the answers.
        selection: operator to the implementation that was chosen.
        rows: the shares, the largest first; they sum to 1.
        coverage: the kernels by provider; None where nothing ran on a device.
        traces: the timelines of the ranks, to be opened in Perfetto.
    """

    model: str
    policy: str
    workload: str
    clock: Clock
    wall_s: float
    output_tokens: int
    selection: Mapping[str, str]
    rows: tuple[Row, ...]
    coverage: Coverage | None
    traces: tuple[str, ...]

    @cached_property
    def total_us(self) -> float:
        """What the shares are of, microseconds, over all ranks."""
        return sum(row.time_us for row in self.rows)

    @property
    def operators(self) -> tuple[Row, ...]:
        """The rows of operators of the catalogue alone, the largest share first."""
        return tuple(row for row in self.rows if row.operator)

    def share(self, operator: str, implementation: str | None = None) -> float:
        """The share of an operator, or of one implementation of it, between 0 and 1."""
        return sum(r.share for r in self.rows if r.operator == operator and implementation in (None, r.implementation))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        plain = {**vars(self), "rows": [asdict(row) for row in self.rows], "total_us": self.total_us}
        plain["coverage"] = self.coverage.as_dict() if self.coverage is not None else None
        return {**plain, "selection": dict(self.selection), "traces": list(self.traces)}


def rows_of_timelines(timelines: Iterable[Timeline], selection: Mapping[str, str]) -> tuple[Row, ...]:
    """The shares of the workers' threads, summed over the ranks.

    Attention is a custom operator of vLLM around the backend that the operator ``attention_backend`` chose.
    """
    times: dict[Owner, float] = defaultdict(float)
    calls: dict[Owner, int] = defaultdict(int)
    for timeline in timelines:
        for span in timeline.spans:
            times[span.owner] += span.time_us
            calls[span.owner] += span.calls
    return _rows((*_labels(owner, selection), calls[owner], time_us) for owner, time_us in times.items())


def _labels(owner: Owner, selection: Mapping[str, str]) -> tuple[str, str, str]:
    if owner.kind == "operator":
        return owner.name, owner.detail, "dispatch"
    if owner.name.startswith(_ATTENTION) and "attention_backend" in selection:
        return "attention_backend", selection["attention_backend"], "dispatch"
    if owner.kind == "torch":
        return "", owner.name, "PyTorch" if owner.name.startswith("aten::") else "torch operator"
    return "", _NAMES[owner.kind], "Python and vLLM" if owner in (MODEL, OUTSIDE) else "inductor"


def rows_of_coverage(coverage: Coverage, selection: Mapping[str, str]) -> tuple[Row, ...]:
    """The shares of the device.

    A kernel that a graph launched belongs to the implementation that its provider has, else to the one that is chosen
    for its operator, unless that one has other kernels: then vLLM computes the operator by itself.
    """
    own = {provider: implementation for implementation, provider in IMPLEMENTATIONS.items()}
    times: dict[tuple[str, str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str, str], int] = defaultdict(int)
    for kernel in coverage.kernels:
        operator = kernel.operator or ""
        chosen = selection.get(operator)
        named = kernel.implementation or own.get(kernel.provider) or (None if chosen in IMPLEMENTATIONS else chosen)
        key = (operator, named or _group(kernel.provider, kernel.matrix_product), kernel.provider.value)
        times[key] += kernel.time_us
        calls[key] += kernel.calls
    return _rows((*key, calls[key], time_us) for key, time_us in times.items())


@dataclass(frozen=True)
class Pair:
    """The same part of two runs: an operator, or what else took time.

    Args:
        name: of the operator or the part.
        implementations: those of the first and of the second run; more than one are joined.
        times_us: microseconds in each.
        shares: between 0 and 1, each of its own run.
    """

    name: str
    implementations: tuple[str, str]
    times_us: tuple[float, float]
    shares: tuple[float, float]


def side_by_side(first: ProfileReport, second: ProfileReport) -> list[Pair]:
    """The parts of two runs, those that take most time in either of them first."""
    parts: dict[str, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for index, report in enumerate((first, second)):
        for row in report.rows:
            parts[row.operator or row.implementation][index].append(row)
    pairs = []
    for name, rows in parts.items():
        used = [", ".join(sorted({row.implementation for row in side if row.operator})) for side in rows]
        times = [sum(row.time_us for row in side) for side in rows]
        shares = [sum(row.share for row in side) for side in rows]
        pairs.append(Pair(name, (used[0], used[1]), (times[0], times[1]), (shares[0], shares[1])))
    return sorted(pairs, key=lambda pair: -max(pair.times_us))


def _group(provider: Provider, matrix_product: bool) -> str:
    return "matrix products" if matrix_product else f"kernels of {provider.value}"


def _rows(parts: Iterable[tuple[str, str, str, int, float]]) -> tuple[Row, ...]:
    found = [part for part in parts if part[4] > 0.0]
    total = sum(part[4] for part in found)
    rows = [Row(*part, share=part[4] / total) for part in found]
    return tuple(sorted(rows, key=lambda row: (-row.time_us, row.operator, row.implementation)))
