#!/usr/bin/env python3
"""Runs vLLM's own tests on our platform, and again without us: ``python scripts/vllm_tests.py SOURCE``.

SOURCE is the unpacked source archive of the vLLM that this Python has installed; its folders `tests` and `examples` are
used, and nothing is fetched. tests/matrix/vllm_tests.toml says which modules run, why the others do not, and what
failures come from. Without us means vLLM's own CPU platform, with plug-ins off.

    python scripts/vllm_tests.py vllm-0.28.0
    python scripts/vllm_tests.py vllm-0.28.0 --groups scheduler sampling
    python scripts/vllm_tests.py vllm-0.28.0 --groups                     nothing runs: the last answers, judged anew

The results go to tests/matrix/vllm_tests.json and docs/compatibility.md.
Exit codes: 0 every failure is explained, 1 one is not, 2 wrong arguments or selection, 3 something is missing here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matrix
import outcome_lines
import vllm_tests_selection
from matrix_environments import describe
from processes import end_with_signal, run_group, vllm_environment
from steps import BootstrapError, cache_dir, say
from vllm_tests_models import make_hub
from vllm_tests_selection import Selection, SelectionError

SCRIPTS = Path(__file__).resolve().parent
NEEDED = ("pytest", "pytest_asyncio", "pytest_timeout", "tblib")
SECONDS_A_TEST = 120
SECONDS_A_GROUP = 1800.0
SIDES: dict[str, dict[str, str]] = {
    "with us": {},
    "without us": {"VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"},
}


@dataclass(frozen=True)
class Answer:
    """How one test ended: "passed", "failed" or "skipped", and what was said of it."""

    outcome: str
    text: str = ""


Answers = Mapping[str, Answer]


def find_tests(source: Path) -> Path:
    """The folder of the tests.

    Raises:
        BootstrapError: there is none, or it is of another version than the vLLM that is installed.
    """
    tests = source / "tests"
    if not (tests / "conftest.py").is_file():
        raise BootstrapError(
            f"{source} has no tests/conftest.py, so it is no source of vLLM.", "Unpack vLLM's source archive, name it."
        )
    about, installed = source / "PKG-INFO", version("vllm")
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    found = next((line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")), installed)
    if found != installed:
        raise BootstrapError(
            f"{source} is vLLM {found}, and this Python has vLLM {installed}.", "Name the source of the same version."
        )
    return tests


def run_modules(
    tests: Path, modules: Sequence[str], settings: Mapping[str, str], log: Path, resume: bool = False
) -> dict[str, Answer]:
    """Answers by test. A process that ends early is followed by one for the tests that remain.

    Args:
        settings: variables of the environment.
        log: takes what pytest writes; the lines of outcome_lines.py go to a file beside it, with the suffix .jsonl.
        resume: keep what such a file has; only tests that did not end run.
    """
    lines = log.with_suffix(".jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    ended_before = [line for line in outcome_lines.read(lines) if resume and line["event"] != "started"]
    lines.write_text("".join(json.dumps(line) + "\n" for line in ended_before), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        # Not the source itself: its `vllm` would be imported in the place of the one that is installed.
        for name in ("tests", "examples"):
            (home / name).symlink_to(tests.parent / name)
        (home / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "outcome_lines", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors"]
        command += [f"--timeout={SECONDS_A_TEST}", *(f"tests/{module}" for module in modules)]
        own = {
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OUTCOME_LINES": str(lines),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: most of these tests would take half of the memory
        }
        environment = vllm_environment(home, **own, **settings)
        known = -1
        while True:
            ended = run_group(command, environment, log, SECONDS_A_GROUP, cwd=home)
            answers = read_answers(lines, ended)
            if ended in ("ended with code 0", "ended with code 1") or len(answers) == known:
                return answers
            known = len(answers)


def read_answers(file: Path, ended: str) -> dict[str, Answer]:
    """What outcome_lines.py wrote; the test that only started has ended with its process, and gets a line that says so.

    Where `ended` is empty the process may still run, or was stopped from outside; such a test has no answer.
    A test that passed and could not clean up has failed.
    """
    answers: dict[str, Answer] = {}
    for line in (lines := outcome_lines.read(file)):
        if line["event"] != "started":
            before = answers.get(line["test"].removeprefix("tests/"))
            if before is None or before.outcome != "failed":
                answers[line["test"].removeprefix("tests/")] = Answer(line["event"], line["text"])
    if ended and lines and lines[-1]["event"] == "started":
        last, text = lines[-1]["test"], f"the process {ended}"
        outcome_lines.write(file, last, "failed", text)
        answers[last.removeprefix("tests/")] = Answer("failed", text)
    return answers


def judge(module: str, sides: Mapping[str, Answers], selection: Selection) -> dict[str, Any]:
    """What the results say of a module: counts, reasons of what failed, and what fails with us alone."""
    ours, theirs = sides["with us"], sides["without us"]
    reasons = {
        test: selection.reason(test, answer.text) for test, answer in sorted(ours.items()) if answer.outcome == "failed"
    }
    return {
        "module": module,
        **{side: count(answers) for side, answers in sides.items()},
        "reasons": dict(sorted(Counter(reason for reason in reasons.values() if reason).items())),
        "unexplained": {test: ours[test].text[-300:] for test, reason in reasons.items() if not reason},
        "with us alone": {
            test: reason for test, reason in reasons.items() if test in theirs and theirs[test].outcome == "passed"
        },
    }


def count(answers: Answers) -> dict[str, int]:
    counts = Counter(answer.outcome for answer in answers.values())
    return {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}


def run(tests: Path, selection: Selection, arguments: argparse.Namespace, hub: Path) -> dict[str, Any]:
    """The results, as tests/matrix/vllm_tests.json has them: of some groups now, of the others from their last run."""
    make_hub(hub, selection.stand_in)
    taken, left = selection.sort(sorted(path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")))
    named = {take.name: (take, taken[index]) for index, take in enumerate(selection.take)}

    def run_part(part: tuple[str, str]) -> dict[str, Answer]:
        name, side = part
        log = log_of(name, side)
        if name not in arguments.groups:
            return read_answers(log.with_suffix(".jsonl"), "")
        settings = {**SIDES[side], "HF_HOME": str(hub), "PYTEST_PLUGINS": "load_vllm_plugins"}
        answers = run_modules(tests, named[name][1], settings, log, arguments.resume)
        say(f"{name}, {side}: {count(answers)}; log: {log}")
        return answers

    parts = [
        (name, side) for name, (take, _) in named.items() for side in SIDES if side == "with us" or not take.engine
    ]
    answers: dict[str, dict[str, Answer]] = {side: {} for side in SIDES}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (_, side), found in zip(parts, pool.map(run_part, parts), strict=True):
            answers[side].update(found)
    judged = {
        name: [
            judge(module, {side: of_module(module, found) for side, found in answers.items()}, selection)
            for module in found
            if of_module(module, answers["with us"])
        ]
        for name, (_, found) in named.items()
    }
    out = {selection.leave[index].reason: len(found) for index, found in left.items()}
    out["taken, but not run yet"] = sum(map(len, taken.values())) - sum(map(len, judged.values()))
    return {
        "environment": describe(Path(sys.executable)),
        "models": [model.name for model in selection.stand_in if not model.same],
        "groups": [{"name": name, "modules": modules} for name, modules in judged.items() if modules],
        "left out": [{"reason": reason, "modules": number} for reason, number in out.items() if number],
    }


def log_of(group: str, side: str) -> Path:
    return cache_dir() / "logs" / f"vllm-tests-{'-'.join(re.findall('[a-zA-Z]+', f'{group} {side}'))}.log"


def of_module(module: str, answers: Answers) -> dict[str, Answer]:
    return {test: answer for test, answer in answers.items() if test.split("::")[0] == module}


def main(argv: Sequence[str]) -> int:
    try:
        selection = vllm_tests_selection.read()
        arguments = parse(argv, [take.name for take in selection.take])
        missing = [name for name in NEEDED if find_spec(name) is None]
        if missing:
            raise BootstrapError(
                f"{', '.join(missing)} cannot be imported.", "docs/development.md says what to install."
            )
        tests = find_tests(arguments.source.absolute())
        end_with_signal()
        with tempfile.TemporaryDirectory() as hub:
            results = run(tests, selection, arguments, Path(hub))
    except BootstrapError as error:
        say(str(error))
        return 3
    except SelectionError as error:
        say(f"Error: {error}")
        return 2
    modules = [module for group in results["groups"] for module in group["modules"]]
    for module in modules:
        tell(module)
    matrix.VLLM_TESTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    matrix.write(matrix.read_results())
    return int(any(module["unexplained"] for module in modules))


def parse(argv: Sequence[str], groups: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs vLLM's own tests on our platform, and again without us.")
    parser.add_argument("source", type=Path, help="unpacked source archive of the installed vLLM")
    parser.add_argument(
        "--groups", nargs="*", default=groups, choices=groups, metavar="GROUP",
        help="run these only, and take the others' answers from their last run (default: all); none: only judge anew",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="run only tests that the last run did not end")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run at a time (default: 2)")
    return parser.parse_args(argv)


def tell(module: Mapping[str, Any]) -> None:
    print(f"{module['module']}: {module['with us']}; without us {module['without us']}")
    for reason, number in module["reasons"].items():
        print(f"    {number} failed: {reason}")
    for test, text in module["unexplained"].items():
        print(f"    {test} failed, and nobody has found out why: {text}")
    for test in module["with us alone"]:
        print(f"    {test} passes without us")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
