"""Known gaps: what an entry covers, when it is stale, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_fl.errors import ConfigError
from vllm_fl.testing import AllowList, CheckResult, Status, Subject, Violation

SUBJECT = Subject("vendor.acme", "rms_norm", "vllm-fl-acme", "vendor")


def failed(check: str = "accuracy", *places: tuple[str, str]) -> CheckResult:
    found = [Violation(check, "differs", case, dtype) for dtype, case in places or (("float16", "odd"),)]
    return CheckResult(check, Status.FAILED, 3, found)


def gaps(text: str) -> AllowList:
    return AllowList.parse(text.encode(), "gaps.yaml")


@pytest.mark.parametrize(
    "entry",
    [
        "{check: accuracy, reason: r}",
        "{check: accuracy, operator: rms_norm, reason: r}",
        "{check: accuracy, operator: '*_norm', implementation: 'vendor.*', dtype: float16, case: od*, reason: r}",
        "{check: accuracy, device: npu, reason: r}",
    ],
)
def test_an_expected_violation_is_a_known_gap(entry: str) -> None:
    allow, result = gaps(f"known_gaps: [{entry}]"), failed()
    allow.apply(SUBJECT, result, "npu")
    assert (result.status, result.notes) == (Status.KNOWN_GAP, ["known gap: r"])
    assert allow.stale() == []


@pytest.mark.parametrize("field", ["operator: silu_and_mul", "implementation: x", "dtype: float32", "case: regular"])
def test_another_violation_stays_a_failure(field: str) -> None:
    allow, result = gaps(f"known_gaps: [{{check: accuracy, reason: r, {field}}}]"), failed()
    allow.apply(SUBJECT, result, "cpu")
    assert result.status is Status.FAILED
    assert len(result.violations) == 1


def test_what_is_left_of_a_failure_is_shown() -> None:
    result = failed("accuracy", ("float16", "odd"), ("float32", "odd"))
    gaps("known_gaps: [{check: accuracy, dtype: float16, reason: r}]").apply(SUBJECT, result, "cpu")
    assert result.status is Status.FAILED
    assert [violation.dtype for violation in result.violations] == ["float32"]


def test_an_entry_that_nothing_needs_is_stale() -> None:
    allow = gaps("known_gaps:\n  - {check: accuracy, operator: rms_norm, reason: r}\n  - {check: graph, reason: r}")
    allow.apply(SUBJECT, CheckResult("accuracy", Status.PASSED, 3), "cpu")
    allow.apply(SUBJECT, CheckResult("graph", Status.SKIPPED), "cpu")
    assert allow.stale() == [
        "gaps.yaml:2:5: the known gap is closed (check accuracy, operator rms_norm, implementation *); remove the entry"
    ]


CHECKS = (
    "results, accuracy, overflow, strides, empty, in-place, refusal, determinism, parameters, fake, compile, graph,"
    " metadata, import, probe, yaml, register, platform"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "known_gap: []",
            "gaps.yaml:1:1: unknown key 'known_gap' (known: known_gaps); did you mean 'known_gaps'?",
        ),
        (
            "known_gaps:\n  - check: acuracy\n    reason: r",
            f"gaps.yaml:2:12: check: 'acuracy' is not a check ({CHECKS}); did you mean 'accuracy'?",
        ),
        (
            "known_gaps:\n  - check: accuracy\n    reason: r\n    operator: rms_nrom",
            "gaps.yaml:4:15: operator: 'rms_nrom' is not an operator of the catalogue; did you mean 'rms_norm'?",
        ),
        (
            "known_gaps:\n  - check: accuracy",
            "gaps.yaml:2:5: the entry has no 'reason'; every known gap needs it",
        ),
        (
            "known_gaps:\n  - check: accuracy\n    reason: r\n    op: rms_norm",
            "gaps.yaml:4:5: unknown key 'op' (known: check, reason, operator, implementation, dtype, case, device)",
        ),
    ],
)
def test_bad_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gaps(text)
    assert str(caught.value) == message


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "gaps.yaml"
    with pytest.raises(ConfigError) as caught:
        AllowList.read(path)
    assert str(caught.value) == (f"allow-list {path}: file {str(path)!r} does not exist; give the path of a YAML file")


def test_an_empty_file_allows_nothing() -> None:
    assert list(gaps("# nothing yet\n").entries) == []
