"""Every operator on the catalogue's inputs, through the simulation, against float64.

What an implementation refuses, it refuses before it writes; which inputs those are is listed.
"""

from __future__ import annotations

import re
from typing import Any

import ops_checking
import pytest
import torch

from vllm_fl.catalog import CATALOG, Case, InputMaker
from vllm_fl_ascend.ops import OPERATORS, Operator

#: (implementation, operator) -> pattern of the names of refused cases.
REFUSED = {
    ("vendor.ascend", "rms_norm"): r"^no weight",
    ("vendor.ascend", "topk_sigmoid"): r"^[^,]+(, scaled|, bias, not renormalised)?$",
    ("vendor.ascend", "grouped_topk"): r", scores|, sigmoid$|^groups of one",
    ("vendor.ascend", "fused_experts"): r"biases|_no_mul|swigluoai|strided",
    ("vendor.ascend", "apply_top_k_top_p"): r"^(large|one request), (both|top k)$|^limits$",
    # Keys and values of the catalogue's caches lie side by side, and so do not come in one piece.
    ("vendor.ascend", "reshape_and_cache"): r"^(?!no tokens|no slots|two caches, NHD)",
    ("vendor.ascend.atb", "reshape_and_cache"): r"^(?!no tokens|no slots|two caches, NHD)",
    # The check copies each tensor, so that cosines and sines are not in one table any more.
    ("vendor.ascend.atb", "rotary_embedding"): r"",
}
#: The operators' own implementations by (implementation, operator).
FUNCTIONS = {(operator.impl_id, operator.fn.__name__): operator.fn for operator in OPERATORS}
BOTH = ("vendor.ascend", "vendor.ascend.atb")


def _id(operator: Operator) -> str:
    return f"{operator.fn.__name__}-{operator.impl_id}"


def _runs() -> list[Any]:
    return [
        pytest.param(operator, dtype, id=f"{_id(operator)}-{dtype}")
        for operator in OPERATORS
        if operator.fn.__name__ != "attention_backend"
        for dtype in CATALOG[operator.fn.__name__].dtypes
    ]


def _takes(operator: Operator, case: Case) -> bool:
    """Whether dispatch would ask the implementation: the first tensor's dtype is one of its own."""
    first = next(value for value in case.args if isinstance(value, torch.Tensor))
    return operator.dtypes is None or str(first.dtype).removeprefix("torch.") in operator.dtypes


@pytest.mark.parametrize(("operator", "dtype"), _runs())
def test_catalogue(simulated_npu: Any, operator: Operator, dtype: str) -> None:
    spec = CATALOG[operator.fn.__name__]
    refused, served = set(), set()
    for case in spec.inputs(InputMaker(getattr(torch, dtype))):
        if not _takes(operator, case):
            continue
        before = [ops_checking.copy(value) for value in case.args]
        try:
            ops_checking.check(spec, operator.fn, case)
        except NotImplementedError:
            refused.add(case.name)
            after = [value for value in case.args if isinstance(value, torch.Tensor)]
            kept = [value for value in before if isinstance(value, torch.Tensor)]
            assert all(map(ops_checking.same_bits, after, kept)), case.name
        else:
            served.add(case.name)
    pattern = REFUSED.get((operator.impl_id, spec.name), r"(?!)")
    assert refused == {name for name in refused | served if re.search(pattern, name)}


def _cache_case(dtype: torch.dtype, slots: list[int], heads: int = 2, size: int = 16) -> Case:
    """Three blocks of 8 tokens, keys and values apart, tokens from a packed projection."""
    maker = InputMaker(dtype)
    packed = maker.normal(len(slots), 2, heads, size)
    caches = [maker.normal(3, 8, heads, size).transpose(1, 2) for _ in range(2)]
    return Case("tokens first", (packed[:, 0], packed[:, 1], *caches, torch.tensor(slots)))


@pytest.mark.parametrize("impl_id", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [[5], [23, 0, 7, 16], list(range(24))], ids=["one", "some", "all"])
def test_reshape_and_cache(simulated_npu: Any, impl_id: str, dtype: torch.dtype, slots: list[int]) -> None:
    function = FUNCTIONS[impl_id, "reshape_and_cache"]
    ops_checking.check(CATALOG["reshape_and_cache"], function, _cache_case(dtype, slots))


def _changed(case: Case, **changes: Any) -> dict[str, Any]:
    return {**ops_checking.arguments(CATALOG["reshape_and_cache"], case), **changes}


@pytest.mark.parametrize("impl_id", BOTH)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([3, -1])}, "torch_npu has no slots that are skipped"),
        ({"slot_mapping": torch.tensor([3.0, 4.0])}, "slots are int32 or int64, not torch.float32"),
        (
            {"value_cache": torch.zeros(3, 8, 2, 16, dtype=torch.float16).transpose(1, 2)},
            "torch_npu converts nothing on the way: torch.float16, torch.float32",
        ),
        (
            {"key_cache": torch.zeros(3, 2, 8, 16)},
            "torch_npu writes to caches that lie as [blocks, tokens, heads, size] only",
        ),
    ],
    ids=["skipped slot", "slots of another dtype", "cache of another dtype", "heads first"],
)
def test_reshape_and_cache_refuses(simulated_npu: Any, impl_id: str, changes: dict[str, Any], message: str) -> None:
    arguments = _changed(_cache_case(torch.float32, [3, 9]), **changes)
    before = {name: ops_checking.copy(value) for name, value in arguments.items()}
    with pytest.raises(NotImplementedError) as caught:
        FUNCTIONS[impl_id, "reshape_and_cache"](**arguments)
    assert str(caught.value) == message
    assert all(ops_checking.same_bits(arguments[name], value) for name, value in before.items())


@pytest.mark.parametrize("is_neox_style", [True, False], ids=["NeoX", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_atb_rotary_embedding(simulated_npu: Any, dtype: str, is_neox_style: bool) -> None:
    spec = CATALOG["rotary_embedding"]
    served = 0
    for case in spec.inputs(InputMaker(getattr(torch, dtype))):
        query, key, cos, *_, neox = case.args
        if key is None or neox != is_neox_style or query.shape[-1] != 2 * cos.shape[-1]:
            continue
        served += 1
        kept = ops_checking.copy(query), ops_checking.copy(key)
        results = FUNCTIONS["vendor.ascend.atb", "rotary_embedding"](*case.args)
        expected = ops_checking.ORACLES["rotary_embedding"](*map(ops_checking.to_numpy, case.args))
        for result, wanted in zip(results, expected, strict=True):
            ops_checking.compare(case.name, result, wanted, spec)
        assert all(map(ops_checking.same_bits, (query, key), kept)), f"{case.name}: an input was written"
    assert served >= 5


@pytest.mark.parametrize("largest", [1.0, 1.2])
def test_angles_are_looked_at_once(simulated_npu: Any, monkeypatch: pytest.MonkeyPatch, largest: float) -> None:
    """Not while a graph is being captured; what was found then holds for other views of the table."""
    table = torch.full((9, 4), largest)

    def is_taken(capturing: bool) -> bool:
        monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: capturing)
        cos, sin = table.chunk(2, -1)
        try:
            FUNCTIONS["vendor.ascend", "rotary_embedding"](
                torch.ones(1, 2, 4), None, cos, sin, torch.zeros(1).long(), True
            )
        except NotImplementedError:
            return False
        return True

    fits = largest == 1
    assert [is_taken(True), is_taken(False), is_taken(True)] == [False, fits, fits]


@pytest.mark.parametrize("k", [1, 3])
def test_expert_elsewhere_counts_for_nothing(simulated_npu: Any, k: int) -> None:
    """Whatever the first expert here makes of its tokens."""
    maker = InputMaker(torch.float32)
    x, w1, w2 = maker.normal(5, 16), maker.normal(2, 24, 16), maker.normal(2, 16, 12)
    ids = torch.tensor([[0, 2, 3], [3, 0, 1], [2, 3, 0], [1, 0, 3], [3, 2, 1]], dtype=torch.int32)[:, :k]
    table = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    weights = maker.uniform(0.1, 1.0, 5, k)
    case = Case("map", (x, w1, w2, weights, ids, "silu", k == 1, table))
    ops_checking.check(CATALOG["fused_experts"], FUNCTIONS["vendor.ascend", "fused_experts"], case)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "rms_norm",
            (torch.ones(2, 8), None, torch.ones(8, dtype=torch.float16), 1e-6),
            "npu_rms_norm needs one dtype, not torch.float16, torch.float32",
        ),
        ("rms_norm", (torch.ones(8), None, torch.ones(8), 1e-6), "npu_rms_norm takes 2 to 8 dimensions, not 1"),
        (
            "rms_norm",
            (torch.ones(2, 8), torch.ones(8), torch.ones(8), 1e-6),
            "npu_rms_norm does not broadcast a residual",
        ),
        (
            "gelu_and_mul",
            (torch.ones(2, 8), "sigmoid"),
            "npu_geglu has the forms 'none' and 'tanh' of GELU, not 'sigmoid'",
        ),
        (
            "rotary_embedding",
            (torch.ones(1, 1000, 4), None, torch.ones(9, 2), torch.ones(9, 2), torch.zeros(1).long(), True),
            "npu_rotary_mul takes 999 heads and 895 entries at most, not 1000 and 4",
        ),
        (
            "rotary_embedding",
            (torch.ones(1, 2, 4), None, torch.full((9, 2), 1.2), torch.ones(9, 2), torch.zeros(1).long(), True),
            "npu_rotary_mul takes cosines and sines, not what is larger than 1",
        ),
        (
            "fused_experts",
            (torch.ones(2, 8), torch.ones(1, 8, 8), torch.ones(1, 8, 4), torch.ones(2, 1), torch.zeros(2, 1).int()),
            "npu_grouped_matmul takes 2 to 1024 experts, not 1",
        ),
        (
            "grouped_topk",
            (torch.ones(2, 4), 2, 1, 2, True, 1.0, None, 1),
            "npu_moe_gating_top_k does not choose 2 of 4 experts in 1 of 2 groups: a group has more than 2, and with "
            "each rounded up to 32 there are at most 2048",
        ),
        (
            "attention_backend",
            (True, False),
            "the Ascend backend has no multi-head latent attention (VLLM_MLA_DISABLE=1 avoids it)",
        ),
        ("attention_backend", (False, True), "the Ascend backend has no sparse attention"),
    ],
)
def test_refused_with_a_reason(simulated_npu: Any, name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        FUNCTIONS["vendor.ascend", name](*args)
    assert str(caught.value) == message
