"""The sum over a token's experts: one pass, float32.

Programs take `block` entries of one token. Any strides. Any device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import GRID_ROWS, cdiv
from .launch import fast
from .planned import planned


@triton.jit
def _is_routed(ids, route, expert_map, num_experts, HAS_MAP: tl.constexpr):
    """Whether the expert of a route exists and, with a map, lives here."""
    expert = tl.load(ids + route).to(tl.int32)
    routed = (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        routed = routed & (tl.load(expert_map + expert, mask=routed, other=-1) >= 0)
    return routed


@fast
@triton.jit(do_not_specialize=["tokens"])
def _sum(
    x, out, ids, expert_map, tokens, size, num_experts, x_token, x_choice, x_entry, out_token, out_entry,
    K: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, ROWS_PER_LAYER: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(2).to(tl.int64) * ROWS_PER_LAYER + tl.program_id(1)
    if token < tokens:
        entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = entry < size
        total = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(K):
            at = x + token * x_token + k * x_choice + entry * x_entry
            if HAS_IDS:
                routed = _is_routed(ids, token * K + k, expert_map, num_experts, HAS_MAP)
                # With a map most routes may be elsewhere; without one, reading need not wait for the id.
                end = tl.where(routed, size, 0) if HAS_MAP else size
                total += tl.where(routed, tl.load(at, mask=entry < end, other=0.0).to(tl.float32), 0.0)
            else:
                total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + token * out_token + entry * out_entry, total.to(out.dtype.element_ty), mask=mask)


@planned
def moe_sum(input: Tensor, output: Tensor, *, block: int = 1024, warps: int = 4) -> None:
    """See :func:`vllm_fl.catalog.moe.moe_sum`."""
    sum_routes(input, output, None, None, 0, block, warps)


def sum_routes(
    input: Tensor,
    output: Tensor,
    topk_ids: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    block: int = 1024,
    warps: int = 4,
) -> None:
    """``moe_sum`` that leaves out the routes to experts that are not here; what `input` has for them is not read.

    Args:
        input: [T, topk, H], floating.
        output: [T, H]; written.
        topk_ids: [T, topk], integers, contiguous; None counts all routes.
        expert_map: [num_experts], int32, -1 for experts elsewhere; or None.
        num_experts: routes to ids outside ``[0, num_experts)`` are left out.
        block, warps: entries and warps of a program.
    """
    tokens, topk, size = input.shape
    if not output.numel():
        return
    grid = (cdiv(size, block), min(tokens, GRID_ROWS), cdiv(tokens, GRID_ROWS))
    _sum[grid](
        input, output, topk_ids, expert_map, tokens, size, num_experts, *input.stride(), *output.stride(),
        K=topk, HAS_IDS=topk_ids is not None, HAS_MAP=expert_map is not None, BLOCK=block,
        ROWS_PER_LAYER=GRID_ROWS, num_warps=warps,
    )  # fmt: skip
