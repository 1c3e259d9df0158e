"""Twelve planted faults: the kit finds each of them, says which it is, and says nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planted_faults import FAULTS, SOUND, Fault

import vllm_fl_reference.ops
from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import BackendImplKind, OpImpl
from vllm_fl.testing import Options, Status, Subject, check_implementation

OPTIONS = Options(dtypes=("float16",), tokens=(1, 33))


def check(operator: str, fn: Callable[..., Any], options: Options = OPTIONS) -> Subject:
    impl = OpImpl(operator, "vendor.sample", BackendImplKind.VENDOR, fn, vendor="sample")
    return check_implementation(impl, CATALOG[operator], getattr(vllm_fl_reference.ops, operator), options)


@pytest.mark.parametrize("operator", SOUND)
def test_sound_operators_pass(operator: str) -> None:
    subject = check(operator, SOUND[operator])
    assert [result.summary() for result in subject.failed] == []
    assert subject.status is Status.PASSED
    assert (subject.refused, subject.cases > 10) == (0, True)


def test_there_are_twelve() -> None:
    assert len({fault.name for fault in FAULTS}) == 12


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_and_named(fault: Fault) -> None:
    subject = check(fault.operator, fault.fn)
    failed = {result.check: result.summary() for result in subject.failed}
    assert fault.check in failed, failed
    for word in fault.words:
        assert word in failed[fault.check]
    assert set(failed) - fault.also == {fault.check}, failed
