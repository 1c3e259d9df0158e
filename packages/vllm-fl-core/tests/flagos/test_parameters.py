"""The parameters of the kernels: what is declared is what the launchers have, and other values compute the same."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kernel_inputs import maker, reference

from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import BackendImplKind, OpImpl
from vllm_fl.dispatch.parameters import Value
from vllm_fl.flagos.parameters import BUCKETS, PARAMETERS
from vllm_fl.flagos.register import TRITON, TRITON_OPERATORS
from vllm_fl.testing.comparison import Truth
from vllm_fl.testing.judge import Judge

#: In float32 the experts' tiles are small whatever is asked for.
DTYPES = {"fused_experts": torch.float16}


def launcher(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"vllm_fl.flagos.{TRITON_OPERATORS[name]}")
    function: Callable[..., Any] = getattr(module, name)
    return function


@pytest.mark.parametrize("name", PARAMETERS)
def test_declared_defaults_are_those_of_the_launcher(name: str) -> None:
    parameters = inspect.signature(launcher(name)).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {p.name: p.default for p in PARAMETERS[name]} == own


def test_buckets_are_of_operators_with_parameters() -> None:
    assert BUCKETS.keys() <= PARAMETERS.keys()


def extreme(values: tuple[Value, ...], end: int) -> Value:
    return [value for value in values if value is not None][end]


@pytest.mark.parametrize("end", [0, -1], ids=["least", "most"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_other_values_compute_the_same(device: str, name: str, end: int) -> None:
    values = {parameter.name: extreme(parameter.values, end) for parameter in PARAMETERS[name]}
    spec, dtype = CATALOG[name], DTYPES.get(name, torch.float32)
    impl = OpImpl(name, TRITON, BackendImplKind.DEFAULT, partial(launcher(name), **values))
    judge = Judge(impl, spec, Truth(spec, reference(name)), lambda: None)
    judge.case(next(iter(spec.inputs(maker(dtype)))), dtype)
    assert [str(violation) for violation in judge.violations] == []
    assert judge.ran["accuracy"] == 1
