"""The operators' specifications: signatures, schemas, and how an implementation may differ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch

from vllm_fl.catalog import CATALOG, DEFAULT_TOLERANCES, Case, InputMaker, OpSpec, operator

#: What the design names; the catalogue may have more.
REQUIRED = {
    "silu_and_mul",
    "gelu_and_mul",
    "rms_norm",
    "gemma_rms_norm",
    "rms_norm_gated",
    "rotary_embedding",
    "attention_backend",
    "reshape_and_cache",
    "topk_softmax",
    "topk_sigmoid",
    "grouped_topk",
    "moe_align_block_size",
    "moe_sum",
    "fused_experts",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_gdn_gating",
    "apply_repetition_penalties",
    "compute_slot_mapping",
    "per_token_group_quant_fp8",
    "scaled_mm",
}


def test_contents() -> None:
    assert set(CATALOG) >= REQUIRED
    assert all(name == spec.name for name, spec in CATALOG.items())
    assert isinstance(CATALOG, MappingProxyType)


def test_importing_the_catalogue_imports_no_torch() -> None:
    code = "import sys, vllm_fl.catalog; print(*sorted({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("spec", CATALOG.values(), ids=list(CATALOG))
def test_documentation(spec: OpSpec) -> None:
    assert spec.called_from
    assert spec.doc.splitlines()[0].endswith((".", ":"))
    assert all(f"\n    {name}: " in spec.doc for name in spec.signature.parameters)
    assert set(spec.dtypes) <= set(DEFAULT_TOLERANCES)


@pytest.mark.parametrize("spec", CATALOG.values(), ids=list(CATALOG))
def test_schema_is_what_torch_library_takes(spec: OpSpec) -> None:
    if spec.name == "attention_backend":  # its result is no tensor, so it never becomes a torch operator
        return
    parsed = torch._C.parse_schema(f"test::{spec.name}{spec.schema}")
    assert [argument.name for argument in parsed.arguments] == list(spec.signature.parameters)
    written = tuple(a.name for a in parsed.arguments if a.alias_info is not None and a.alias_info.is_write)
    assert written == spec.mutates


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("rms_norm", "(Tensor x, Tensor? residual, Tensor? weight, float epsilon) -> Tensor[]"),
        ("gelu_and_mul", '(Tensor x, str approximate="none") -> Tensor[]'),
        ("moe_sum", "(Tensor input, Tensor(a1!) output) -> Tensor[]"),
        (
            "causal_conv1d_update",
            "(Tensor x, Tensor weight, Tensor? bias, Tensor(a3!) conv_states, Tensor cache_indices, "
            'str? activation="silu") -> Tensor[]',
        ),
    ],
)
def test_schema(name: str, schema: str) -> None:
    assert CATALOG[name].schema == schema


def test_str_is_the_signature_without_types() -> None:
    assert str(CATALOG["gelu_and_mul"]) == "gelu_and_mul(x, approximate='none')"


def test_tolerance() -> None:
    spec = CATALOG["fused_experts"]
    assert spec.tolerance(torch.bfloat16) == spec.tolerances["bfloat16"] != DEFAULT_TOLERANCES["bfloat16"]
    assert spec.tolerance(torch.float32) == DEFAULT_TOLERANCES["float32"]


@pytest.mark.parametrize(
    ("parameters", "difference"),
    [
        ("x, approximate='none'", None),
        ("x", None),
        ("x, approximate='none', stream=None", None),
        ("*args, **kwargs", None),
        ("", "parameter 'x' is missing"),
        ("self, x", "parameter 1 is named 'self', the operator's is 'x'"),
        ("x, mode='none'", "parameter 2 is named 'mode', the operator's is 'approximate'"),
        ("x, approximate='tanh'", "parameter 'approximate' defaults to 'tanh', the operator's defaults to 'none'"),
        ("x=None", "parameter 'x' defaults to None, the operator's has no default"),
        ("x, approximate", "parameter 'approximate' has no default, the operator's defaults to 'none'"),
        ("x, *, stream", "parameter 'stream' is not one of the operator's and has no default"),
    ],
)
def test_mismatch(parameters: str, difference: str | None) -> None:
    function = eval(f"lambda {parameters}: None")
    assert CATALOG["gelu_and_mul"].mismatch(function) == difference


def test_mutates_names_parameters() -> None:
    def double(x: torch.Tensor, out: torch.Tensor) -> None: ...

    with pytest.raises(ValueError) as raised:
        operator(called_from="nowhere", mutates=("output",))(double)
    assert str(raised.value) == "double: mutates names ['output'], not parameters of double(x, out)"


def test_a_specification_without_a_generator_has_no_cases() -> None:
    def double(x: torch.Tensor) -> torch.Tensor: ...

    assert list(OpSpec(double, "nowhere").inputs(InputMaker(torch.float32))) == []


def test_cases_have_no_keywords_unless_given() -> None:
    assert Case("plain", (1,)).kwargs == {}


def test_input_maker_draws_the_same_numbers_for_every_dtype() -> None:
    makers = [InputMaker(dtype, seed=3) for dtype in (torch.float64, torch.bfloat16)]
    draws: tuple[Callable[[InputMaker], torch.Tensor], ...] = (
        lambda m: m.normal(4, 5, scale=2.0),
        lambda m: m.uniform(-1.0, 3.0, 6),
        lambda m: m.integers(0, 9, 7),
        lambda m: m.permutation(8),
    )
    for draw in draws:
        wide, narrow = (draw(maker) for maker in makers)
        assert torch.equal(wide.to(narrow.dtype), narrow)
    assert not torch.equal(makers[0].normal(9), InputMaker(torch.float64, seed=4).normal(9))


def test_input_maker_dtypes_and_ranges() -> None:
    maker = InputMaker(torch.float16)
    assert maker.normal(2, 3).dtype == torch.float16
    assert maker.normal(2, dtype=torch.float32).dtype == torch.float32
    assert maker.integers(5, 7, 100).unique().tolist() == [5, 6]
    assert maker.integers(0, 2, 3).dtype == torch.int32
    assert sorted(maker.permutation(6).tolist()) == list(range(6))
    drawn = maker.uniform(2.0, 3.0, 200, dtype=torch.float64)
    assert 2.0 <= float(drawn.min()) <= float(drawn.max()) < 3.0
    assert maker.full(1.5, 2, 2).tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert maker.tensor([1, 2]).dtype == torch.int64
