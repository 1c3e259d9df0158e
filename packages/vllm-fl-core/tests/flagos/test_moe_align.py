"""Grouping of routes by expert, on both paths, against a literal grouping."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE, maker

from vllm_fl.catalog import CATALOG
from vllm_fl.flagos.kernels import moe_align
from vllm_fl.flagos.kernels.moe_align import moe_align_block_size

SHAPES = [(1, 1, 4, 16), (7, 3, 60, 16), (5, 8, 8, 4), (40, 6, 64, 16), (3, 2, 7, 128)]
if DEVICE != "cpu":
    SHAPES += [(64, 10, 512, 16), (1024, 10, 512, 64), (16384, 8, 128, 128)]


def choices(tokens: int, topk: int, experts: int) -> torch.Tensor:
    make = maker(seed=tokens)
    rows = [make.permutation(experts)[:topk] for _ in range(tokens)]
    return torch.stack(rows) if rows else make.integers(0, experts, 0, topk)


def check(ids: torch.Tensor, block: int, experts: int, local: torch.Tensor | None = None, ignore: bool = False) -> None:
    """Every expert's blocks hold its routes, each once, and padding; nothing else is in the counted blocks."""
    args = (ids, block, experts, local, False, ignore)
    got = moe_align_block_size(*args)
    for result, shape in zip(got, CATALOG["moe_align_block_size"].fake(*args), strict=True):
        assert (result.shape, result.dtype) == (shape.shape, shape.dtype)
    routes, labels, total = (result.cpu() for result in got)
    flat = ids.flatten().tolist()
    where = list(range(experts)) if local is None else local.tolist()
    if ignore:  # experts are local ones then
        flat, where = [where[e] for e in flat], list(range(experts))
    start = 0
    for expert in range(experts):
        mine = [r for r, e in enumerate(flat) if e == expert]
        end = start + -(-len(mine) // block) * block
        slots = routes[start:end].tolist()
        assert sorted(slots) == mine + [len(flat)] * (end - start - len(mine)), f"expert {expert}"
        assert labels[start // block : end // block].tolist() == [where[expert]] * ((end - start) // block)
        start = end
    assert int(total) == start
    assert (labels[start // block :] == -1).all()


@pytest.fixture(params=["one launch", "two launches"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths at any size."""
    if request.param == "two launches":
        monkeypatch.setitem(moe_align_block_size.__kwdefaults__, "small", 0)
        if DEVICE == "cpu":
            monkeypatch.setattr(moe_align, "_CHUNK", 32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("tokens", "topk", "experts", "block"), SHAPES)
def test_groups(device: str, tokens: int, topk: int, experts: int, block: int) -> None:
    check(choices(tokens, topk, experts), block, experts)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("ignore", [False, True])
def test_experts_of_other_ranks(device: str, ignore: bool) -> None:
    local = torch.tensor([4, -1, 1, -1, -1, 0, 3, -1, 2], dtype=torch.int32, device=device)
    check(choices(11, 4, 9), 4, 9, local, ignore)


@pytest.mark.usefixtures("path")
def test_all_routes_to_one_expert_and_ids_out_of_range(device: str) -> None:
    check(torch.full((21, 2), 3, dtype=torch.int32, device=device), 16, 6)
    check(torch.tensor([[0, -1], [7, 5], [99, 0]], dtype=torch.int32, device=device), 4, 6)


def test_no_tokens(device: str) -> None:
    check(choices(0, 2, 8), 16, 8)


def test_sorted_ids_rounded_up_to_blocks(device: str) -> None:
    args = (choices(5, 2, 3), 4, 3, None, True, False)
    sizes = [result.shape for result in moe_align_block_size(*args)]
    assert sizes == [shape.shape for shape in CATALOG["moe_align_block_size"].fake(*args)]
