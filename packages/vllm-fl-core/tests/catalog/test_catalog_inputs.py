"""The input generators: what each sweep must contain, and that it tests the operator and not the rounding of ties."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fl.catalog import CATALOG, Case, InputMaker, OpSpec

NUMERIC = [spec for spec in CATALOG.values() if spec.name != "attention_backend"]
each = pytest.mark.parametrize("spec", NUMERIC, ids=lambda spec: spec.name)


@cache
def cases(name: str, dtype: torch.dtype) -> tuple[Case, ...]:
    return tuple(CATALOG[name].inputs(InputMaker(dtype)))


def bound(spec: OpSpec, case: Case) -> dict[str, Any]:
    return dict(spec.signature.bind(*case.args, **case.kwargs).arguments)


def tensors(spec: OpSpec, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Case, str, Tensor]]:
    for case in cases(spec.name, dtype):
        for name, value in bound(spec, case).items():
            if isinstance(value, Tensor):
                yield case, name, value


@pytest.mark.parametrize("spec", CATALOG.values(), ids=list(CATALOG))
def test_every_operator_has_cases_with_names_of_their_own(spec: OpSpec) -> None:
    names = [case.name for case in cases(spec.name, torch.float32)]
    assert names
    assert len(set(names)) == len(names)
    for case in cases(spec.name, torch.float32):
        spec.signature.bind(*case.args, **case.kwargs)


@each
def test_there_are_empty_single_and_several_tokens(spec: OpSpec) -> None:
    first = next(iter(spec.signature.parameters))
    if spec.name == "fused_gdn_gating":  # its first argument has no token dimension
        first = "a"
    if spec.name == "compute_slot_mapping":
        first = "slot_mapping"
    sizes = {bound(spec, case)[first].shape[0] for case in cases(spec.name, torch.float32)}
    assert {0, 1} <= sizes
    assert max(sizes) > 5


@each
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_any_number_of_tokens(spec: OpSpec, tokens: int) -> None:
    assert spec.sized is not None
    arguments = bound(spec, spec.sized(InputMaker(torch.float32), tokens))
    assert tokens in {value.shape[0] for value in arguments.values() if isinstance(value, Tensor)}
    spec.fake(**arguments)


def test_right_answers_of_a_free_order_have_one_form() -> None:
    """Routes 0 and 2 go to expert 1, route 1 to expert 0: their order, and what is past the count, is free."""
    spec = CATALOG["moe_align_block_size"]
    assert spec.canonical is not None
    arguments = {"topk_ids": torch.tensor([[1], [0], [1]]), "block_size": 2, "num_experts": 2}
    labels, total = torch.tensor([0, 1, -1]), torch.tensor([4])
    forms = [
        spec.canonical(arguments, (torch.tensor(routes), labels, total))[0].tolist()
        for routes in ([1, 3, 0, 2, 9], [1, 3, 2, 0, 3], [1, 3, 2, 2, 3])
    ]
    assert forms == [[1, 3, 0, 2, 3], [1, 3, 0, 2, 3], [1, 3, 2, 2, 3]]


@each
def test_some_tensor_is_not_contiguous(spec: OpSpec) -> None:
    # Their arguments come out of small tables that vLLM itself makes contiguous.
    if spec.name in {"compute_slot_mapping", "grouped_topk", "moe_align_block_size", "topk_sigmoid", "topk_softmax"}:
        return
    assert any(not value.is_contiguous() for _, _, value in tensors(spec))


@each
def test_numbers_are_the_same_in_every_dtype(spec: OpSpec) -> None:
    dtypes = [getattr(torch, name) for name in spec.dtypes] + [torch.float64]
    sweeps = [list(tensors(spec, dtype)) for dtype in dtypes]
    for variants in zip(*sweeps, strict=True):
        assert len({case.name for case, _, _ in variants}) == 1
        *narrow, (case, name, wide) = variants
        for _, _, value in narrow:
            expected = wide.to(value.dtype)
            # Some are rounded twice: to the dtype, then by an operation of the generator.
            step = 2 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0
            torch.testing.assert_close(
                value.double(), expected.double(), rtol=step, atol=step, msg=f"{case.name}: {name}"
            )


@each
def test_dtypes(spec: OpSpec) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        if str(dtype).removeprefix("torch.") not in spec.dtypes:
            continue
        found = {value.dtype for _, _, value in tensors(spec, dtype) if value.is_floating_point()}
        assert dtype in found or spec.name in {"compute_slot_mapping", "moe_align_block_size"}
        assert found <= {dtype, torch.float32, torch.float8_e4m3fn}


@each
def test_meta_functions_take_the_cases(spec: OpSpec) -> None:
    """They compute nothing, so they also work on tensors without data, and agree with themselves there."""
    for case in cases(spec.name, torch.float32):
        arguments = bound(spec, case)
        meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
        real, empty = spec.fake(**arguments), spec.fake(**meta)
        real, empty = (list(r) if isinstance(r, tuple) else [] if r is None else [r] for r in (real, empty))
        assert bool(real) == (spec.signature.return_annotation != "None")
        assert [(r.shape, r.dtype, r.stride()) for r in real] == [(r.shape, r.dtype, r.stride()) for r in empty]
        assert {r.device.type for r in empty} <= {"meta"}


@each
def test_written_tensors_do_not_overlap_themselves(spec: OpSpec) -> None:
    for case, name, value in tensors(spec):
        if name in spec.mutates and value.numel():
            steps = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
            reach = 1
            for stride, size in steps:
                assert stride >= reach, f"{case.name}: {name}"
                reach = stride * (size - 1) + reach


def scores(name: str, arguments: dict[str, Any]) -> Tensor:
    """What the router ranks, in float64."""
    if name == "grouped_topk":
        logits, kind, bias = arguments["scores"], arguments["scoring_func"], arguments["bias"]
    else:
        logits, kind = arguments["gating_output"], 1 if name == "topk_sigmoid" else 2
        bias = arguments.get("e_score_correction_bias")
    logits = logits.double()
    ranked = (logits, logits.sigmoid(), logits.softmax(-1))[kind]
    return ranked if bias is None else ranked + bias.double()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("topk_softmax", "topk_sigmoid", "grouped_topk")
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if str(dtype).removeprefix("torch.") in CATALOG[name].dtypes
    ],
)
def test_routing_does_not_hang_on_rounding(name: str, dtype: torch.dtype) -> None:
    """The best scores of each token lie further apart than float32 and a fast exponential err."""
    spec = CATALOG[name]
    for case in cases(name, dtype):
        arguments = bound(spec, case)
        topk = arguments["topk"] if name == "grouped_topk" else arguments["topk_weights"].shape[1]
        ranked = scores(name, arguments)
        if name == "grouped_topk":
            groups = ranked.unflatten(-1, (arguments["n_group"], -1))
            count = 1 if arguments["bias"] is None else min(2, groups.shape[-1])
            assert _least_gap(groups.topk(count).values.sum(-1), arguments["topk_group"]) > 1e-5, case.name
        assert _least_gap(ranked, topk) > (2e-6 if ranked.shape[-1] > 256 else 1e-5), case.name


def _least_gap(ranked: Tensor, count: int) -> float:
    best = ranked.sort(-1, descending=True).values[:, : count + 1]
    gaps = best[:, :-1] - best[:, 1:]
    return float(gaps.min()) if gaps.numel() else 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rotary_embedding", ("grouped heads", "partial", "no key", "interleaved", "NeoX", "odd|one pair")),
        ("rms_norm", ("residual", "no weight", "odd", "large values")),
        ("reshape_and_cache", ("padding slots", "only padding", "NHD", "HND", "fewer slots")),
        ("fused_experts", ("expert map", "biases", "router weight on the input", "swigluoai", "relu2_no_mul", "odd")),
        ("causal_conv1d_fn", ("bias", "padding slots", "empty sequences", "shorter than the window", "no initial")),
        ("causal_conv1d_update", ("bias", "padding slots", "channels last", "channels first", "wide state")),
        (
            "chunk_gated_delta_rule",
            ("padding slots", "chunk bounds", "mixed lengths", "scale", "no initial", "strided"),
        ),
        ("topk_sigmoid", ("bias", "renormalised", "scaled")),
        ("moe_align_block_size", ("map", "ignored", "padded", "fewer routes than experts")),
        ("scaled_mm", ("tensor scales", "row and column", "blocks", "bias", "int8", "float8_e4m3fn", "row-major")),
        ("per_token_group_quant_fp8", ("column major", "powers of two", "zeros")),
    ],
)
def test_the_special_cases_are_there(name: str, words: tuple[str, ...]) -> None:
    names = "; ".join(case.name for case in cases(name, torch.float32))
    for word in words:
        assert any(part in names for part in word.split("|")), word
