"""Every operator on every case of the catalogue, in every dtype, against its literal float64 form."""

from __future__ import annotations

import pytest
import torch
from ops_checking import ORACLES, check

import vllm_fl_reference.ops as ops
from vllm_fl.catalog import CATALOG, InputMaker

#: Results of float64 inputs are float64, and compared as such; but float8 is float8.
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_NUMERIC = [name for name in CATALOG if name != "attention_backend"]
_SWEEPS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name in _NUMERIC
    for dtype in _DTYPES
    if dtype in (*CATALOG[name].dtypes, "float64")
]


def test_every_operator_has_an_oracle() -> None:
    assert set(ORACLES) >= set(_NUMERIC)


@pytest.mark.parametrize(("name", "dtype"), _SWEEPS)
def test_cases(name: str, dtype: str) -> None:
    spec = CATALOG[name]
    cases = list(spec.inputs(InputMaker(getattr(torch, dtype))))
    assert cases
    for case in cases:
        check(spec, getattr(ops, name), case)
