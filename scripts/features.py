#!/usr/bin/env python3
"""Takes the outcomes of the tests of features into tests/matrix/features.json and docs/compatibility.md.

    .cache/tools/bin/tox run -e e2e-more
    .venv/bin/python scripts/features.py .cache/junit/e2e-more.xml

A test with the mark ``feature(name)`` says in its first line what it checks; its cases are one row of the document. A
row of an earlier run stays until its tests run again, or are gone; what was never run is "not run".
"""

from __future__ import annotations

import ast
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matrix_environments import describe
from matrix_page import rows

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "e2e"
RESULTS = ROOT / "tests" / "matrix" / "features.json"
HEAD = """\
## Features

What of vLLM works on the CPU platform, on the development version, {vllm} (Python {Python}, torch {torch}, transformers
{transformers}). Written by `scripts/features.py` from the tests `tests/e2e/test_features*.py`, which run in
`tox run -e e2e-more`; a test checks that no row is missing.
"""


def known() -> list[tuple[str, str]]:
    """(feature, what is checked), in the order of the features' names."""
    found = []
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "feature":
                    about = ast.get_docstring(node) or ""  # type: ignore[arg-type]  # only functions have decorators
                    found.append((str(ast.literal_eval(call.args[0])), about.partition("\n")[0]))
    return sorted(dict.fromkeys(found), key=lambda row: row[0].strip("`").casefold())


def read_results() -> dict[str, Any]:
    """The environment, and a row each for what is checked; no row if there was no run yet."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"features": []}
    return results


def outcomes(files: Iterable[Path]) -> dict[tuple[str, str], str]:
    """By feature and check: "passed" if every case that ran did, else "failed", or "skipped" if none ran."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            about = {entry.get("name", ""): entry.get("value", "") for entry in case.iter("property")}
            if "feature" in about:
                bad = {child.tag for child in case} & {"failure", "error", "skipped"}
                outcome = "passed" if not bad else "skipped" if bad == {"skipped"} else "failed"
                found.setdefault((about["feature"], about["checked"]), set()).add(outcome)
    return {row: next(o for o in ("failed", "passed", "skipped") if o in cases) for row, cases in found.items()}


def merge(results: dict[str, Any], environment: dict[str, str], new: dict[tuple[str, str], str]) -> dict[str, Any]:
    """`results` with these outcomes in the place of older ones, without rows that no test has any more."""
    found = {(row["feature"], row["checked"]): row["outcome"] for row in results["features"]} | new
    features = [{"feature": row[0], "checked": row[1], "outcome": found.get(row, "not run")} for row in known()]
    return {"environment": environment, "features": features}


def section(results: dict[str, Any]) -> list[str]:
    """Lines of docs/compatibility.md; none without rows."""
    if not results["features"]:
        return []
    table = [["Feature", "", "What is checked"]]
    for row in results["features"]:
        table.append([row["feature"], row["outcome"], row["checked"].replace("|", "\\|")])
    return [HEAD.format(**results["environment"]), *rows(table), ""]


def main(files: list[str]) -> int:
    import matrix

    if not files:
        print(__doc__, file=sys.stderr)
        return 2
    merged = merge(read_results(), describe(Path(sys.executable)), outcomes(map(Path, files)))
    RESULTS.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    matrix.write(matrix.read_results())
    return int(any(row["outcome"] != "passed" for row in merged["features"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
