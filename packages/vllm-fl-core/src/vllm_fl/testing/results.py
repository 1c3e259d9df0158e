"""What conformance checks are called, and what they found. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

#: Checks of one implementation of an operator, in the order of the table.
CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "results": "number, shape, dtype, device and strides of the results are those of the operator's meta function",
        "accuracy": "results and written arguments are those of float64, within the operator's tolerance",
        "overflow": "the same where squares of the inputs pass the largest number of the dtype",
        "strides": "tensors that are not contiguous give what their contiguous copies give",
        "empty": "no tokens give no results, and no error",
        "in-place": "nothing is written but what the operator may write, and no result is an argument's memory",
        "refusal": "what is not supported is said by NotImplementedError, before anything is written",
        "determinism": "the same arguments give the same bits",
        "parameters": "with every value of its parameters it computes the same",
        "fake": "on fake tensors, without data, it gives the shapes and dtypes of the operator's meta function",
        "compile": "torch.compile takes it whole, for any number of tokens, and computes the same",
        "graph": "a captured graph replays it with other values, where the device captures graphs",
    }
)

#: Checks of what a distribution declares, and of its platform.
PLATFORM_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "metadata": "the distribution's metadata: bounds for vllm-fl-core, Python, license",
        "import": "its entry points load where torch, vLLM and the vendor's SDK are missing",
        "probe": "the probe answers, without vLLM being imported",
        "yaml": "the platform file is valid and names what exists",
        "register": "everything registers, with the declared kind and vendor",
        "platform": "the platform class has what vLLM asks of it, and its device methods answer",
    }
)


class Status(str, Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    KNOWN_GAP = "known gap"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong.

    Args:
        check: which check found it.
        text: what is wrong, with the numbers.
        case: the case of the catalogue; empty where there is none.
        dtype: name of the case's dtype.
    """

    check: str
    text: str
    case: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.dtype, self.case) if part)
        return f"{where}: {self.text}" if where else self.text


@dataclass
class CheckResult:
    """What one check of one subject found.

    Args:
        check: its name.
        status: how it ended.
        ran: number of calls that were judged.
        violations: what is wrong.
        notes: what the violations have in common, or why the check was skipped, or the reasons of known gaps.
    """

    check: str
    status: Status
    ran: int = 0
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Notes and the first violations, one a line."""
        lines = [*self.notes, *map(str, self.violations[:3])]
        if len(self.violations) > 3:
            lines.append(f"and {len(self.violations) - 3} more")
        return "\n".join(lines)


@dataclass
class Subject:
    """An implementation of an operator, or the declarations of a backend (`operator` is empty then).

    Args:
        name: the implementation's id, or the backend's name.
        operator: the operator.
        distribution: who brings it.
        kind: kind of the implementation.
        checks: by name.
        cases: calls that the implementation was offered.
        refused: calls that it refused properly.
        seconds: how long its checks took.
        reference_based: whether it is marked as one that calls the reference.
    """

    name: str
    operator: str = ""
    distribution: str = ""
    kind: str = ""
    checks: dict[str, CheckResult] = field(default_factory=dict)
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    reference_based: bool = False

    @property
    def title(self) -> str:
        return f"{self.operator} {self.name}" if self.operator else self.name

    @property
    def failed(self) -> list[CheckResult]:
        return [result for result in self.checks.values() if result.status is Status.FAILED]

    @property
    def status(self) -> Status:
        """FAILED if any check failed, else KNOWN_GAP if any is one, else PASSED; SKIPPED if nothing ran."""
        found = {result.status for result in self.checks.values()}
        for status in (Status.FAILED, Status.KNOWN_GAP, Status.PASSED):
            if status in found:
                return status
        return Status.SKIPPED


@dataclass
class Report:
    """A run of the conformance checks.

    Args:
        device: where the operators ran.
        versions: of the distributions that matter.
        subjects: what was checked.
        stale: entries of the allow-list that nothing needed, and that therefore fail.
        left: what an interrupt left unchecked.
    """

    device: str
    versions: dict[str, str] = field(default_factory=dict)
    subjects: list[Subject] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed, something ran, and nothing was left."""
        statuses = {subject.status for subject in self.subjects}
        is_good = Status.FAILED not in statuses and statuses - {Status.SKIPPED} != set()
        return is_good and not self.stale and not self.left

    @property
    def operators(self) -> list[Subject]:
        return [subject for subject in self.subjects if subject.operator]

    def results(self) -> Iterator[tuple[Subject, CheckResult]]:
        for subject in self.subjects:
            for result in subject.checks.values():
                yield subject, result

    def counts(self) -> dict[str, int]:
        """Number of checks by status."""
        counts = {status.value: 0 for status in Status}
        for _, result in self.results():
            counts[result.status.value] += 1
        return counts

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return {
            "ok": self.ok,
            "device": self.device,
            "versions": self.versions,
            "counts": self.counts(),
            "stale": self.stale,
            "left": self.left,
            "subjects": [_subject(subject) for subject in self.subjects],
        }


def _subject(subject: Subject) -> dict[str, Any]:
    checks = {
        name: {
            "status": result.status.value,
            "ran": result.ran,
            "notes": result.notes,
            "violations": [vars(violation) for violation in result.violations],
        }
        for name, result in subject.checks.items()
    }
    plain = {name: value for name, value in vars(subject).items() if name != "checks"}
    return {**plain, "status": subject.status.value, "checks": checks}
