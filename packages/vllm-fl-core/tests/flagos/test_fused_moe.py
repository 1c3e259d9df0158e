"""The experts' computation and the sum over choices, against the reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, TOKENS, check, maker

from vllm_fl.catalog import CATALOG, Case
from vllm_fl.flagos.kernels import fused_moe
from vllm_fl.flagos.kernels.fused_moe import Tile, fused_experts, tiles
from vllm_fl.flagos.kernels.moe_sum import moe_sum, sum_routes


@functools.cache
def cases(name: str, dtype: torch.dtype) -> dict[str, Case]:
    return {case.name: case for case in CATALOG[name].cases(maker(dtype))}


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("case", cases("moe_sum", torch.float32))
def test_sum(device: str, dtype: torch.dtype, case: str) -> None:
    check(moe_sum, "moe_sum", *cases("moe_sum", dtype)[case].args)


def test_sum_of_more_tokens_than_a_grid_has(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_fl.flagos.kernels.moe_sum.GRID_ROWS", 4)
    check(moe_sum, "moe_sum", maker().normal(11, 2, 8), maker().normal(11, 8))


@pytest.mark.parametrize("has_map", [False, True], ids=["ids", "map"])
def test_sum_without_experts_that_are_elsewhere(device: str, has_map: bool) -> None:
    x, out = maker().normal(3, 2, 40), maker().normal(3, 40)
    ids = torch.tensor([[0, -1], [4, 1], [2, 0]], device=device)
    table = torch.tensor([3, -1, 0, -1], dtype=torch.int32, device=device) if has_map else None
    left_out = torch.tensor([[0, 1], [1, has_map], [0, 0]], dtype=torch.bool, device=device)
    want = x.masked_fill(left_out[..., None], 0).sum(1)
    x.masked_fill_(left_out[..., None], float("nan"))
    sum_routes(x, out, ids, table, 4)
    torch.testing.assert_close(out, want)


#: On the path without groups the expert is found in another way; what follows is the same.
UNGROUPED = [
    "regular",
    "odd",
    "expert map",
    "expert map, biases",
    "all experts elsewhere",
    "router weight on the input",
]


@pytest.mark.parametrize("case", [c for c in cases("fused_experts", torch.float32) if DEVICE != "cpu" or c != "large"])
def test_experts(device: str, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setitem(fused_experts.__kwdefaults__, "sparse", 10**6)
    check(fused_experts, "fused_experts", *cases("fused_experts", torch.float32)[case].args)


@pytest.mark.parametrize("case", UNGROUPED)
def test_experts_one_by_one(device: str, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setitem(fused_experts.__kwdefaults__, "sparse", 0)
    check(fused_experts, "fused_experts", *cases("fused_experts", torch.float32)[case].args)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_IDS[1:])
@pytest.mark.parametrize("case", ["regular", "odd", "silu, biases", "expert map"])
def test_experts_in_half_precision(device: str, dtype: torch.dtype, case: str) -> None:
    check(fused_experts, "fused_experts", *cases("fused_experts", dtype)[case].args)


@pytest.mark.parametrize("tile", [(16, 32, 32, 1, 4, 3), (32, 16, 64, 3, 4, 2), (64, 64, 32, 16, 4, 4)], ids=str)
def test_tiles_and_bands(device: str, monkeypatch: pytest.MonkeyPatch, tile: tuple[int, ...]) -> None:
    """Several blocks an expert, bands that the blocks do not fill, tiles that the columns do not fill."""
    monkeypatch.setattr(fused_moe, "tiles", lambda *args, **options: (Tile(*tile), Tile(*tile)))
    make = maker()
    ids = torch.cat([make.integers(0, 2, 62, 2), make.integers(2, 12, 5, 2)])
    w1, w2 = make.normal(12, 2 * 40, 72, scale=72**-0.5), make.normal(12, 72, 40, scale=40**-0.5)
    check(fused_experts, "fused_experts", make.normal(67, 72), w1, w2, make.uniform(0.1, 1.0, 67, 2), ids)


@pytest.mark.parametrize("tokens", TOKENS)
def test_numbers_of_tokens(device: str, tokens: int) -> None:
    make = maker(DTYPES[-1])
    w1, w2 = make.normal(16, 2 * 32, 48, scale=48**-0.5), make.normal(16, 48, 32, scale=32**-0.5)
    ids = torch.stack([make.permutation(16)[:4] for _ in range(tokens)])
    check(fused_experts, "fused_experts", make.normal(tokens, 48), w1, w2, make.uniform(0.1, 1.0, tokens, 4), ids)


@pytest.mark.parametrize("sparse", [0, 10**6], ids=["one by one", "grouped"])
def test_negative_ids_contribute_nothing(device: str, monkeypatch: pytest.MonkeyPatch, sparse: int) -> None:
    monkeypatch.setitem(fused_experts.__kwdefaults__, "sparse", sparse)
    args = list(cases("fused_experts", torch.float32)["regular"].args)
    args[4] = args[4].clone()
    args[4][1] = -1
    args[4][3, 0] = -1
    got = check(fused_experts, "fused_experts", *args)
    assert (got[1] == 0).all()


def rows(routes: int, experts: int) -> int:
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    pair = tiles(routes, experts, 768, 2048, like, is_grouped=True, is_gated=True)
    assert pair[0].rows == pair[1].rows
    return pair[0].rows


def test_rows_of_a_tile_follow_the_routes_of_an_expert() -> None:
    found = [rows(tokens * 8, 128) for tokens in (1, 64, 192, 256, 512, 1024, 8192)]
    assert found == [16, 16, 16, 32, 64, 128, 128]


def test_few_programs_are_narrower() -> None:
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    pairs = [tiles(routes, 128, 768, 2048, like, is_grouped=False, is_gated=True) for routes in (8, 16, 64)]
    assert [(first.columns, second.columns) for first, second in pairs] == [(32, 32), (32, 64), (64, 128)]


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_moe, "shared_memory", lambda device: 65536)
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    first, second = tiles(65536, 128, 768, 2048, like, is_grouped=True, is_gated=True)
    assert first == second == Tile(64, 64, 32, 8, 4, 2)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            {"activation": "swiglu"},
            NotImplementedError,
            "activation: 'swiglu' is not one of silu, gelu, gelu_tanh, swigluoai, silu_no_mul, gelu_no_mul,"
            " gelu_tanh_no_mul, relu2_no_mul",
        ),
        (
            {"apply_router_weight_on_input": True},
            ValueError,
            "fused_experts: apply_router_weight_on_input needs topk 1, got topk_ids of 2 columns",
        ),
        (
            {"w1": torch.zeros(8, 64, 128, device=DEVICE)[..., ::2]},
            NotImplementedError,
            "w1: the last dimension has stride 2, expected 1",
        ),
        (
            {"w2": torch.zeros(8, 64, 32, device=DEVICE, dtype=torch.float16)},
            NotImplementedError,
            "w2: torch.float16, hidden_states torch.float32; they must be the same",
        ),
    ],
    ids=["activation", "router weight", "stride", "dtype"],
)
def test_refusals(device: str, changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    names = list(CATALOG["fused_experts"].signature.parameters)
    arguments = dict(zip(names, cases("fused_experts", torch.float32)["regular"].args, strict=False))
    with pytest.raises(kind) as caught:
        fused_experts(**{**arguments, **changes})
    assert str(caught.value) == text
