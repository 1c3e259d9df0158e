"""The part of docs/compatibility.md on vLLM's own tests, from the results of scripts/vllm_tests.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from textwrap import fill
from typing import Any

from matrix_page import rows

OUTCOMES = ("passed", "failed", "skipped")
HEAD = """\
## vLLM's own tests

`scripts/vllm_tests.py` runs tests of vLLM's source archive on the CPU platform, and once more without us: on vLLM's own
CPU platform, without compiled kernels, with plug-ins off. `tests/matrix/vllm_tests.toml` says which modules run and why
the others do not; `tests/matrix/vllm_tests.json` has the results of each module.
"""


def section(results: dict[str, Any]) -> list[str]:
    """Lines of the section."""
    modules = [module for group in results["groups"] for module in group["modules"]]
    environment = ", ".join(f"{name} {number}" for name, number in results["environment"].items())
    models = ", ".join(f"`{name}`" for name in results["models"])
    alone = {test: reason for module in modules for test, reason in module["with us alone"].items()}
    return [
        HEAD,
        fill(f"{environment}. There is no network. Models made here stand in for {models}.", 120),
        "",
        *table(
            ["Tests of", "modules", *OUTCOMES, *(f"without us: {outcome}" for outcome in OUTCOMES)], counts(results)
        ),
        "",
        *only_with_us(alone),
        "",
        "Where the failures come from:",
        "",
        *table(["Reason", "failures"], by_reason(modules)),
        "",
        "What does not run:",
        "",
        *table(["Reason", "modules"], [[left["reason"], left["modules"]] for left in results["left out"]]),
        "",
    ]


def counts(results: dict[str, Any]) -> list[list[Any]]:
    """A row for each group, and one for all."""
    groups = {group["name"]: group["modules"] for group in results["groups"]}
    found = []
    for name, modules in {**groups, "all": [module for group in groups.values() for module in group]}.items():
        sides = [[sum(m[side][o] for m in modules) for o in OUTCOMES] for side in ("with us", "without us")]
        found.append([name, len(modules), *sides[0], *sides[1]])
    return found


def only_with_us(alone: dict[str, str | None]) -> list[str]:
    if not alone:
        return ["No test passes without us and fails with us."]
    found = [[f"`{test}`", reason or "not found out"] for test, reason in alone.items()]
    return ["These pass without us and fail with us:", "", *table(["Test", "Reason"], found)]


def by_reason(modules: list[dict[str, Any]]) -> list[list[Any]]:
    found: Counter[str] = Counter()
    for module in modules:
        found.update(module["reasons"])
        if module["unexplained"]:
            found["not found out"] += len(module["unexplained"])
    return [[reason, number] for reason, number in found.most_common()]


def table(head: list[str], found: Iterable[list[Any]]) -> list[str]:
    return rows([head, *([str(cell).replace("|", "\\|") for cell in row] for row in found)])
