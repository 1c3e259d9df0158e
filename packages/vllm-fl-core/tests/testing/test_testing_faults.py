"""Twelve planted faults: the kit finds each of them, says which it is, and says nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, SOUND, Fault

import vllm_fl_reference.ops
from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import BackendImplKind, OpImpl, Parameter
from vllm_fl.testing import Options, Status, Subject, check_implementation

OPTIONS = Options(dtypes=("float16",), tokens=(1, 33))


def check(operator: str, fn: Callable[..., Any], options: Options = OPTIONS, **fields: Any) -> Subject:
    impl = OpImpl(operator, "vendor.sample", BackendImplKind.VENDOR, fn, vendor="sample", **fields)
    return check_implementation(impl, CATALOG[operator], getattr(vllm_fl_reference.ops, operator), options)


@pytest.mark.parametrize("operator", SOUND)
def test_sound_operators_pass(operator: str) -> None:
    subject = check(operator, SOUND[operator])
    assert [result.summary() for result in subject.failed] == []
    assert subject.status is Status.PASSED
    assert (subject.refused, subject.cases > 10) == (0, True)


def in_blocks(x: torch.Tensor, *, block: int = 2, mode: str = "exact") -> torch.Tensor:
    """Leaves out the last entry in blocks of eight, and does not know a mode that it has declared."""
    if mode == "fast":
        raise RuntimeError("no such mode")
    out: torch.Tensor = SOUND["silu_and_mul"](x)
    if block == 8:
        out[..., -1:] = 0
    return out


def test_a_parameter_is_checked_with_each_of_its_values() -> None:
    parameters = (Parameter("block", (2, 4, 8), 2), Parameter("mode", ("exact", "fast"), "exact"))
    options = Options(dtypes=("float16",), checks=("parameters", "refusal"))
    subject = check("silu_and_mul", in_blocks, options, parameters=parameters)
    failed = {result.check: [str(violation) for violation in result.violations] for result in subject.failed}
    assert failed.keys() == {"parameters", "refusal"}
    assert failed["parameters"][0].startswith("float16, regular, block=8: result 0")
    assert failed["refusal"] == [
        "float16, regular, mode=fast: raised RuntimeError: no such mode;"
        " NotImplementedError says that a call does not fit"
    ]


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
