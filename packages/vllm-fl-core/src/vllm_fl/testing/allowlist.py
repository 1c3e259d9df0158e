"""Known gaps: a YAML file that says which failures are expected, each with its reason.

A file holds one key, ``known_gaps``, a list of entries. An entry has ``check`` and ``reason``, and narrows itself down
by ``operator``, ``implementation``, ``dtype``, ``case`` and ``device``; each of these is a name or a pattern such as
``large*``. An entry whose check ran and passed is stale, and fails the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_fl.catalog import CATALOG
from vllm_fl.config.document import Document, parse, read_path
from vllm_fl.config.problems import ConfigProblems, Problem
from vllm_fl.errors import did_you_mean

from .results import CHECKS, PLATFORM_CHECKS, CheckResult, Status, Subject, Violation

#: Name of the file that a distribution ships in its package.
FILE_NAME = "conformance.yaml"
_CHECKS = (*CHECKS, *PLATFORM_CHECKS)


class KnownGap(BaseModel):
    """One entry. Patterns are those of a shell; ``*`` is everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: str
    reason: str = Field(min_length=1)
    operator: str = "*"
    implementation: str = "*"
    dtype: str = "*"
    case: str = "*"
    device: str = "*"

    @field_validator("check")
    @classmethod
    def _known_check(cls, value: str) -> str:
        if value not in _CHECKS:
            raise ValueError(f"{value!r} is not a check ({', '.join(_CHECKS)}){did_you_mean(value, _CHECKS)}")
        return value

    @field_validator("operator")
    @classmethod
    def _known_operator(cls, value: str) -> str:
        if not set("*?[") & set(value) and value not in CATALOG:
            raise ValueError(f"{value!r} is not an operator of the catalogue{did_you_mean(value, CATALOG)}")
        return value

    def covers(self, subject: Subject, violation: Violation, device: str) -> bool:
        """Whether this entry expects the violation."""
        return (
            self.concerns(subject, violation.check, device)
            and fnmatchcase(violation.dtype, self.dtype)
            and fnmatchcase(violation.case, self.case)
        )

    def concerns(self, subject: Subject, check: str, device: str) -> bool:
        """Whether this entry speaks of that check of that subject."""
        return (
            self.check == check
            and fnmatchcase(subject.operator, self.operator)
            and fnmatchcase(subject.name, self.implementation)
            and fnmatchcase(device, self.device)
        )


@dataclass
class AllowList:
    """The known gaps of a run, with the place of each."""

    entries: Sequence[tuple[KnownGap, str]] = ()
    _used: set[str] = field(default_factory=set)
    _ran: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: str | Path) -> AllowList:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, or anything in it is wrong; the message has the lines.
        """
        return cls(_entries(read_path(Path(path), str(path), f"allow-list {path}")))

    @classmethod
    def parse(cls, data: bytes, name: str) -> AllowList:
        """Read `data`, the content of the file `name`. Raises as :meth:`read`."""
        return cls(_entries(parse(data, name)))

    def __add__(self, other: AllowList) -> AllowList:
        return AllowList((*self.entries, *other.entries))

    def apply(self, subject: Subject, result: CheckResult, device: str) -> None:
        """Take the expected violations out of a failed result; it is a known gap if none is left."""
        if result.status is Status.SKIPPED:
            return
        left = []
        for violation in result.violations:
            entry = next((pair for pair in self.entries if pair[0].covers(subject, violation, device)), None)
            if entry is None:
                left.append(violation)
                continue
            self._used.add(entry[1])
            if (note := f"known gap: {entry[0].reason}") not in result.notes:
                result.notes.append(note)
        self._ran.update(place for gap, place in self.entries if gap.concerns(subject, result.check, device))
        if result.violations and not left:
            result.status = Status.KNOWN_GAP
        if left:
            result.violations = left

    def stale(self) -> list[str]:
        """Entries that speak of checks that ran, and that expected nothing of what was found."""
        return [
            f"{place}: the known gap is closed (check {gap.check}, operator {gap.operator}, implementation"
            f" {gap.implementation}); remove the entry"
            for gap, place in self.entries
            if place in self._ran - self._used
        ]


def _entries(document: Document) -> list[tuple[KnownGap, str]]:
    raw: dict[str, Any] = document.raw
    problems = list(document.problems)
    for key in raw:
        if key != "known_gaps":
            text = f"unknown key {key!r} (known: known_gaps){did_you_mean(key, ['known_gaps'])}"
            problems.append(Problem(document.place((key,), True), "", text))
    listed = raw.get("known_gaps") or []
    entries = []
    for index, item in enumerate(listed if isinstance(listed, list) else [listed]):
        try:
            gap = KnownGap.model_validate(item)
        except ValidationError as error:
            problems += [_problem(document, index, detail) for detail in error.errors(include_url=False)]
        else:
            entries.append((gap, document.place(("known_gaps", index))))
    if problems:
        raise ConfigProblems(problems)
    return entries


def _problem(document: Document, index: int, detail: Any) -> Problem:
    location = ("known_gaps", index, *detail["loc"])
    name = str(detail["loc"][0]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        known = list(KnownGap.model_fields)
        text = f"unknown key {name!r} (known: {', '.join(known)}){did_you_mean(name, known)}"
        return Problem(document.place(location, True), "", text)
    if detail["type"] == "missing":
        return Problem(document.place(location), "", f"the entry has no {name!r}; every known gap needs it")
    return Problem(document.place(location), name, str(detail["msg"]).removeprefix("Value error, "))
