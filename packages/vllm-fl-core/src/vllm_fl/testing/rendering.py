"""A report for people (table), for CI (JUnit) and for a README (badge)."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from .results import Report, Status, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

_MARKS = {
    Status.PASSED: ("ok", "green"),
    Status.FAILED: ("FAIL", "bold red"),
    Status.KNOWN_GAP: ("gap", "yellow"),
    Status.SKIPPED: ("not checked", "dim"),
}


def show(report: Report, console: Console) -> None:
    """Print the tables, what is wrong, and the badge line."""
    from rich.text import Text

    if report.operators:
        console.print(_table(f"Operators on {report.device}", report.operators, True))
    if backends := [subject for subject in report.subjects if not subject.operator]:
        console.print(_table("Backends", backends, False))
    for heading, statuses in (("Known gaps", {Status.KNOWN_GAP}), ("Failures", {Status.FAILED})):
        found = [(subject, result) for subject, result in report.results() if result.status in statuses]
        if found:
            console.print(Text(f"\n{heading}", style="bold"))
        for subject, result in found:
            console.print(Text(f"{subject.title}: {result.check}", style=_MARKS[result.status][1]))
            lines = result.notes if result.status is Status.KNOWN_GAP else result.summary().splitlines()
            for line in lines:
                console.print(Text(f"    {line}"))
    for line in [*_unavailable(report), *report.stale]:
        console.print(Text(line))
    if report.left:
        console.print(Text(f"\nInterrupted; not checked: {', '.join(report.left)}", style="bold"))
    counts = ", ".join(f"{count} {name}" for name, count in report.counts().items() if count)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(Text(f"\nChecks: {counts or 'none'}. {versions}."))
    console.print(Text(badge(report)), soft_wrap=True)


def _table(title: str, subjects: Sequence[Subject], is_operators: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in ("operator", "implementation") if is_operators else ("backend",):
        table.add_column(column, overflow="fold")
    for column in ("checks", "calls", "refused") if is_operators else ("checks",):
        table.add_column(column, justify="right")
    table.add_column("result", overflow="fold")
    for subject in subjects:
        ran = [result for result in subject.checks.values() if result.status is not Status.SKIPPED]
        numbers = [len(ran), subject.cases, subject.refused] if is_operators else [len(ran)]
        label = f"{subject.name} (reference-based)" if subject.reference_based else subject.name
        names = [subject.operator, label] if is_operators else [label]
        table.add_row(*names, *map(str, numbers), Text(*_outcome(subject)))
    return table


def _outcome(subject: Subject) -> tuple[str, str]:
    """The status of a subject, with the checks that did not pass, and its style."""
    parts = []
    for status in (Status.FAILED, Status.KNOWN_GAP):
        names = [result.check for result in subject.checks.values() if result.status is status]
        if names:
            parts.append(f"{_MARKS[status][0]} {', '.join(names)}")
    mark, style = _MARKS[subject.status]
    return "; ".join(parts) or mark, style


def _unavailable(report: Report) -> list[str]:
    """Why implementations were not checked, each reason once."""
    reasons: dict[str, list[str]] = {}
    for subject in report.operators:
        if subject.status is Status.SKIPPED and subject.checks:
            reasons.setdefault(next(iter(subject.checks.values())).notes[0], []).append(subject.title)
    return [f"Not checked ({reason}): {', '.join(titles)}" for reason, titles in reasons.items()]


def badge(report: Report) -> str:
    """A line of Markdown with the result, for a README."""
    checked = [subject for subject in report.operators if subject.status is not Status.SKIPPED]
    good = sum(subject.status is not Status.FAILED for subject in checked)
    gaps = sum(result.status is Status.KNOWN_GAP for _, result in report.results())
    text = f"{good} of {len(checked)} operators on {report.device}" if checked else "no operator was checked"
    if gaps:
        text += f", {gaps} known gap{'s' if gaps > 1 else ''}"
    colour = "red" if not report.ok else "lightgrey" if not checked else "yellow" if gaps else "brightgreen"
    label = quote("vllm-fl conformance".replace("-", "--"))
    image = f"https://img.shields.io/badge/{label}-{quote(text.replace('-', '--'))}-{colour}"
    return f"![vllm-fl conformance: {text}]({image})"


def write_junit(report: Report, path: Path) -> None:
    """Write one test case a check; stale entries of the allow-list, and what is left, are failures of their own."""
    counts = report.counts()
    others = [("allow-list", line) for line in report.stale]
    others += [("interrupted", f"{name}: not checked") for name in report.left]
    suite = ET.Element(
        "testsuite",
        name="vllm-fl conformance",
        tests=str(sum(counts.values()) + len(others)),
        failures=str(counts["failed"] + len(others)),
        errors="0",
        skipped=str(counts["skipped"] + counts["known gap"]),
        time=f"{sum(subject.seconds for subject in report.subjects):.3f}",
    )
    for subject, result in report.results():
        owner = f"{subject.distribution}.{subject.operator or 'backend'}"
        seconds = subject.seconds / max(len(subject.checks), 1)
        case = ET.SubElement(
            suite, "testcase", classname=owner, name=f"{subject.name}[{result.check}]", time=f"{seconds:.3f}"
        )
        if result.status is Status.FAILED:
            first = str(result.violations[0]) if result.violations else result.summary()
            ET.SubElement(case, "failure", message=_printable(first)).text = _printable(result.summary())
        elif result.status is not Status.PASSED:
            ET.SubElement(case, "skipped", message=_printable("; ".join(result.notes)))
    for owner, line in others:
        case = ET.SubElement(suite, "testcase", classname=owner, name=line.partition(": ")[0])
        ET.SubElement(case, "failure", message=line)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = ET.ElementTree(ET.Element("testsuites"))
    tree.getroot().append(suite)  # type: ignore[union-attr]
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
