"""The experts' computation (fused_experts): two grouped matrix products, the activation in the first one's epilogue.

Routes are grouped by expert in blocks (moe_align_block_size), a program computes a tile of one block's result, and the
activation is applied to the gate and up products while they are in registers: a program of the first product loads two
tiles of weights, one of gate rows and one of up rows. The second product applies the router's weights, and the routes
of a token are added up at the end. The grid has room for every block that there could be; how many there are is read on
the device, where the others end at once. If tokens are so few that hardly two share an expert (`sparse` experts or more
a route), each route is a block of its own and nothing is grouped.

Weights are read once if all programs of an expert run at about the same time. Programs therefore walk along the rows of
one block's weights first, and over `band` blocks first where an expert has several.

Products are of the inputs' dtype with float32 sums (float32: IEEE products, no TF32). The activation is applied to the
unrounded sums; its result, and each route's result, are rounded to the inputs' dtype. The last dimension of all tensors
must be contiguous. Any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .common import cdiv, multiprocessors, need_unit_stride, shared_memory
from .launch import fast
from .moe_align import moe_align_block_size
from .moe_sum import sum_routes
from .planned import planned

#: Activation -> (of the gate, or of the only half; whether there is an up half).
_ACTIVATIONS = {
    "silu": ("silu", True),
    "gelu": ("gelu", True),
    "gelu_tanh": ("gelu_tanh", True),
    "swigluoai": ("swigluoai", True),
    "silu_no_mul": ("silu", False),
    "gelu_no_mul": ("gelu", False),
    "gelu_tanh_no_mul": ("gelu_tanh", False),
    "relu2_no_mul": ("relu2", False),
}


class Tile(NamedTuple):
    """Launch configuration of a grouped product."""

    rows: int  # routes of a block
    columns: int  # of the result; of a gated product, columns of each half
    depth: int
    band: int  # blocks that follow each other along the same weights
    warps: int
    stages: int


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Activation of float32 values, times `up` if gated; "" is none."""
    if ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, 7.0)
        y = (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0) * gate * tl.sigmoid(1.702 * gate)
    elif ACTIVATION == "relu2":
        y = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif ACTIVATION == "":
        y = gate
    else:
        y = activate(gate, ACTIVATION)
        if GATED:
            y *= up
    return y


@triton.jit
def _grouped_block(block_experts, num_slots, tiles, ROWS: tl.constexpr, BAND: tl.constexpr):
    """Block, tile of columns and expert of a program; programs of a band take all its blocks before the next tile."""
    pid = tl.program_id(0)
    blocks = tl.load(num_slots) // ROWS
    first = pid // (BAND * tiles) * BAND
    size = tl.maximum(tl.minimum(blocks - first, BAND), 1)
    in_band = pid % (BAND * tiles)
    block = first + in_band % size
    return block, in_band // size, tl.load(block_experts + block, mask=pid < blocks * tiles, other=-1)


@triton.jit
def _single_block(ids, expert_map, num_experts, tiles, HAS_MAP: tl.constexpr):
    """The same where each route is a block."""
    block = tl.program_id(0) // tiles
    expert = tl.load(ids + block).to(tl.int32)
    if HAS_MAP:
        expert = tl.load(expert_map + expert, mask=(expert >= 0) & (expert < num_experts), other=-1)
    return block, tl.program_id(0) % tiles, tl.where(expert < num_experts, expert, -1)


@fast
@triton.jit(do_not_specialize=["routes"])
def _grouped_product(
    x, weight, bias, out, scales, ids, expert_map, sorted_routes, block_experts, num_slots,
    routes, n, k, num_experts, stride_x, stride_e, stride_n, stride_bias, stride_out,
    CHOICES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, SCALE_SUMS: tl.constexpr,
    SCALE_RESULT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, GROUPED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """``out[r] = act(x[r // CHOICES] @ weight[expert of r].T)``; [n] columns, or [2 n] rows of weights if GATED."""
    tiles = tl.cdiv(n, COLUMNS)
    lane = tl.arange(0, ROWS)
    if GROUPED:
        block, tile, expert = _grouped_block(block_experts, num_slots, tiles, ROWS, BAND)
    else:
        block, tile, expert = _single_block(ids, expert_map, num_experts, tiles, HAS_MAP)
    if expert < 0:
        return
    if GROUPED:
        route = tl.load(sorted_routes + block * ROWS + lane)
        live = route < routes
    else:
        live = lane == 0
        route = tl.where(live, block, 0)

    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    in_row = (column < n)[None, :]
    step = tl.arange(0, DEPTH)
    x_at = x + (route // CHOICES)[:, None].to(tl.int64) * stride_x + step[None, :]
    w_at = weight + expert.to(tl.int64) * stride_e + column[None, :].to(tl.int64) * stride_n + step[:, None]
    up_half = tl.full((), 1, tl.int64) * n * stride_n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        x_mask, w_mask = live[:, None], in_row
        if not EVEN:
            inside = step < k - start
            x_mask, w_mask = x_mask & inside[None, :], w_mask & inside[:, None]
        a = tl.load(x_at, mask=x_mask, other=0.0)
        b = tl.load(w_at, mask=w_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if GATED:
            c = tl.load(w_at + up_half, mask=w_mask, other=0.0)
            up = tl.dot(a, c, up, input_precision=PRECISION)
        x_at += DEPTH
        w_at += DEPTH

    if SCALE_SUMS or SCALE_RESULT:
        scale = tl.load(scales + route, mask=live, other=0.0).to(tl.float32)[:, None]
    if SCALE_SUMS:
        total *= scale
        up *= scale
    if HAS_BIAS:
        b_at = bias + expert.to(tl.int64) * stride_bias + column
        total += tl.load(b_at, mask=column < n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(b_at + n, mask=column < n, other=0.0).to(tl.float32)[None, :]
    total = _activate(total, up, ACTIVATION, GATED)
    if SCALE_RESULT:
        total *= scale
    at = out + route[:, None].to(tl.int64) * stride_out + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & in_row)


@planned
def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    *,
    sparse: int = 4,
    rows: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """See :func:`vllm_fl.catalog.moe.fused_experts`."""
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"activation: {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    tensors = {"hidden_states": hidden_states, "w1": w1, "w2": w2, "w1_bias": w1_bias, "w2_bias": w2_bias}
    for name, x in tensors.items():
        if x is not None:
            need_unit_stride(name, x)
    for name, x in (("w1", w1), ("w2", w2)):
        if x.dtype != hidden_states.dtype:
            raise NotImplementedError(f"{name}: {x.dtype}, hidden_states {hidden_states.dtype}; they must be the same")
    tokens, choices = topk_ids.shape
    if apply_router_weight_on_input and choices != 1:
        raise ValueError(f"fused_experts: apply_router_weight_on_input needs topk 1, got topk_ids of {choices} columns")
    if hidden_states.numel() == 0 or choices == 0:
        return torch.zeros_like(hidden_states)

    act, is_gated = _ACTIVATIONS[activation]
    inner, hidden = w2.shape[2], w2.shape[1]
    num_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    ids, scales = topk_ids.contiguous(), topk_weights.contiguous()
    routes = tokens * choices
    grouped = tokens > 1 and routes * sparse > num_experts
    sizes = (routes, num_experts, inner, hidden, hidden_states)
    first, second = tiles(*sizes, is_grouped=grouped, is_gated=is_gated, rows=rows if grouped else None)
    groups: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    blocks = routes
    if grouped:
        groups = moe_align_block_size(ids, first.rows, num_experts, expert_map, False, True)
        blocks = groups[1].shape[0]
    common = {"HAS_MAP": expert_map is not None, "GROUPED": grouped, "routes": routes, "num_experts": num_experts}
    if warps or stages:
        first, second = (t._replace(warps=warps or t.warps, stages=stages or t.stages) for t in (first, second))
    h = hidden_states.new_empty((routes, inner))
    y = hidden_states.new_empty((routes, hidden))
    _launch(
        first, blocks, hidden_states, w1, w1_bias, h, scales, ids, expert_map, *groups,
        CHOICES=choices, ACTIVATION=act, GATED=is_gated, SCALE_SUMS=apply_router_weight_on_input, SCALE_RESULT=False,
        **common,
    )  # fmt: skip
    _launch(
        second, blocks, h, w2, w2_bias, y, scales, ids, expert_map, *groups,
        CHOICES=1, ACTIVATION="", GATED=False, SCALE_SUMS=False, SCALE_RESULT=not apply_router_weight_on_input,
        **common,
    )  # fmt: skip
    out = hidden_states.new_empty((tokens, hidden))
    sum_routes(y.view(tokens, choices, hidden), out, ids, expert_map, num_experts)
    return out


def _launch(
    tile: Tile, blocks: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *tensors: Tensor | None,
    **options: object,
) -> None:  # fmt: skip
    n, k = out.shape[1], x.shape[1]
    _grouped_product[(blocks * cdiv(n, tile.columns),)](
        x, weight, bias, out, *tensors, n=n, k=k,
        stride_x=x.stride(0), stride_e=weight.stride(0), stride_n=weight.stride(1),
        stride_bias=0 if bias is None else bias.stride(0), stride_out=out.stride(0),
        HAS_BIAS=bias is not None, EVEN=k % tile.depth == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, BAND=tile.band,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


def tiles(
    routes: int,
    experts: int,
    inner: int,
    hidden: int,
    like: Tensor,
    *,
    is_grouped: bool,
    is_gated: bool,
    rows: int | None = None,
) -> tuple[Tile, Tile]:
    """Launch configurations of both products, which share the number of rows.

    The number of rows follows the mean number of routes an expert, since the weights of an expert are read once for
    each of its blocks and every block computes all its rows. Up to 32 rows reading the weights is what takes the time:
    tiles are deep, to have many bytes on their way. Above it is the products: tiles are large, to load little for each.

    Args:
        routes: tokens times choices.
        experts: on all ranks, since `routes` are those to all of them.
        inner: columns of the first product.
        hidden: columns of the second one.
        like: a tensor of the inputs' dtype and device.
        is_grouped: a block may hold several routes.
        is_gated: the first product has two tiles of weights.
        rows: the number of rows, if it is not to follow the routes; no more than fit are taken.
    """
    mean = routes / experts if is_grouped else 1.0
    rows = rows or next((rows for rows, most in ((16, 12), (32, 24), (64, 63)) if mean <= most), 128)
    halves = 2 if is_gated else 1
    if like.dtype == torch.float32:
        rows = min(rows, 32)
        tile = Tile(rows, 32, 32, 1, 4, 1)
        return tile, tile
    shared = shared_memory(like.device)
    if shared < 160 * 1024:
        rows = min(rows, 64)
        tile = Tile(rows, 64, 32, 8 if rows == 64 else 1, 4, 2)
        return tile, tile
    if rows == 16:
        # Few programs: narrower tiles make more of them.
        programs = min(routes, experts)
        wanted = 2 * multiprocessors(like.device)
        first = _narrowed(Tile(16, 128 // halves, 128, 1, 4, 3), inner, programs, wanted)
        return first, _narrowed(Tile(16, 128, 128, 1, 4, 3), hidden, programs, wanted)
    if rows == 32:
        return Tile(32, 128 // halves, 64, 1, 4, 4), Tile(32, 128, 64, 1, 4, 4)
    if rows == 64:
        return Tile(64, 128 // halves, 64, 1, 4, 4), Tile(64, 128, 64, 1, 4, 4)
    # More columns would spill where products take their operands from registers.
    columns, stages = (256, 4) if shared >= 200 * 1024 else (128, 3)
    return Tile(128, columns // halves, 64, 16, 8, stages), Tile(128, columns, 64, 16, 8, stages)


def _narrowed(tile: Tile, columns: int, blocks: int, wanted: int) -> Tile:
    while tile.columns > 32 and blocks * cdiv(columns, tile.columns) < wanted:
        tile = tile._replace(columns=tile.columns // 2)
    return tile
