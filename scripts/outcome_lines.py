"""A plug-in of pytest: one line of JSON for each event of a test, in the file that OUTCOME_LINES names.

A process that ends early leaves its lines, and the last one says in which test it ended; the next process runs only
tests that have no line yet. scripts/vllm_tests.py reads them. Events: "started", then "passed", "failed" or "skipped";
a module that cannot be collected is a test of its name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: Characters of a failure that are kept, from its end.
KEPT = 6000


def pytest_collection_modifyitems(items: list[Any]) -> None:
    done = {line["test"] for line in read(Path(os.environ["OUTCOME_LINES"]))}
    items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        item.add_marker("skip_global_cleanup")  # vLLM's own mark for tests without a GPU; its cleanup takes seconds


def read(file: Path) -> list[dict[str, str]]:
    """The lines, in their order."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started", "")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, _text(report))


def pytest_collectreport(report: Any) -> None:
    if report.outcome != "passed" and report.nodeid:
        _write(report.nodeid, report.outcome, _text(report))


def _text(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    if getattr(report, "wasxfail", None) is not None:
        return f"expected failure: {report.wasxfail}"
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    return str(report.longrepr)[-KEPT:]


def _write(test: str, event: str, text: str) -> None:
    write(Path(os.environ["OUTCOME_LINES"]), test, event, text)


def write(file: Path, test: str, event: str, text: str) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"test": test, "event": event, "text": text}) + "\n")
