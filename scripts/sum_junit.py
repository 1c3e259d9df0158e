"""Print the sum over the JUnit files (*.xml) in a folder as one closing line.

python3 scripts/sum_junit.py .cache/junit
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path


def totals(files: Iterable[Path]) -> tuple[int, int, int]:
    """(passed, failed, skipped) over the test suites in `files`; an error in set-up counts as failed."""
    tests = failed = skipped = 0
    for file in files:
        for suite in ElementTree.parse(file).iter("testsuite"):
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    return tests - failed - skipped, failed, skipped


if __name__ == "__main__":
    print("{} passed, {} failed, {} skipped".format(*totals(sorted(Path(sys.argv[1]).glob("*.xml")))))
