"""Group routes by expert (moe_align_block_size): one launch for few routes, two for many, one compilation for all.

A route's slot is the first slot of its expert plus a rank, and the rank comes from an atomic increment on a row of
cursors that the program keeps for itself. Nothing has to be cleared before a launch, and no size is a constant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import cdiv
from .launch import fast
from .planned import planned

_CHUNK = 512  # routes a program takes at a time on the parallel path
_MAX_PROGRAMS = 96
_SMALL_PROGRAMS, _ROWS = 8, 16


@triton.jit
def _layout(counts, block_size: tl.constexpr):
    """First slot and number of blocks of each expert, from its number of routes; and the number of slots."""
    blocks = (counts + block_size - 1) // block_size
    padded = blocks * block_size
    return tl.cumsum(padded, 0) - padded, blocks, tl.sum(padded, 0)


@triton.jit
def _load_experts(topk_ids, expert_map, offsets, limit, num_experts, IGNORE_REMOTE: tl.constexpr):
    """Expert of each route; `num_experts` stands for none (out of range, or remote and to be left out).

    With IGNORE_REMOTE by their local ids.
    """
    e = tl.load(topk_ids + offsets, mask=offsets < limit, other=num_experts).to(tl.int32)
    e = tl.where((e < 0) | (e >= num_experts), num_experts, e)
    if IGNORE_REMOTE:
        local = tl.load(expert_map + e, mask=e < num_experts, other=-1)
        e = tl.where(local < 0, num_experts, local)
    return e


@triton.jit
def _store_experts(expert_ids, expert_map, e, first_block, blocks, num_experts, step, steps, HAS_MAP: tl.constexpr):
    """The expert of each block; `steps` programs share the work."""
    label = e
    if HAS_MAP:
        label = tl.load(expert_map + e, mask=e < num_experts, other=-1)
    for i in range(step, tl.max(blocks, 0), steps):
        tl.store(expert_ids + first_block + i, label, mask=i < blocks)


@triton.jit
def _fill(results, value, begin, end, step, CHUNK: tl.constexpr):
    lane = tl.arange(0, CHUNK)
    for i in range(begin, end, step):
        tl.store(results + i + lane, tl.zeros((CHUNK,), tl.int32) + value, mask=i + lane < end)


@fast
@triton.jit(do_not_specialize=["numel", "num_blocks"])
def _align_small(
    topk_ids, expert_map, sorted_ids, expert_ids, num_post_pad, cursors, numel, num_blocks, num_experts,
    block_size: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_MAP: tl.constexpr, IGNORE_REMOTE: tl.constexpr,
):  # fmt: skip
    """Every program counts all routes and places those of its own share of the experts."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lane, e = tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    expert = _load_experts(topk_ids, expert_map, lane, numel, num_experts, IGNORE_REMOTE)
    counts = tl.histogram(expert, EXPERTS, mask=expert < num_experts)
    first, blocks, total = _layout(counts, block_size)
    share = EXPERTS // programs
    low, high = pid * share, (pid + 1) * share
    own = (e >= low) & (e < high)
    tl.store(cursors + e, first, mask=own)
    if pid == 0:
        tl.store(num_post_pad, total)
    padded = blocks * block_size
    begin = tl.sum(tl.where(e < low, padded, 0), 0)
    _fill(sorted_ids, numel, begin, begin + tl.sum(tl.where(own, padded, 0), 0), CHUNK, CHUNK)
    _fill(expert_ids, -1, total // block_size + pid * CHUNK, num_blocks, programs * CHUNK, CHUNK)
    _store_experts(expert_ids, expert_map, e, first // block_size, tl.where(own, blocks, 0), num_experts, 0, 1, HAS_MAP)
    tl.debug_barrier()  # cursors and padding are written before they are taken and overwritten
    found = (expert >= low) & (expert < high) & (expert < num_experts)
    slot = tl.atomic_add(cursors + expert, 1, mask=found, sem="relaxed", scope="cta")
    tl.store(sorted_ids + slot, lane, mask=found)


@fast
@triton.jit(do_not_specialize=["numel", "num_slots", "num_blocks", "per_program"])
def _count(
    topk_ids, expert_map, sorted_ids, expert_ids, counts, numel, num_slots, num_blocks, num_experts, per_program,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, IGNORE_REMOTE: tl.constexpr,
):  # fmt: skip
    """Routes an expert in this program's share; fill this program's share of both results with padding."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    mine = tl.zeros((EXPERTS,), tl.int32)
    end = tl.minimum((pid + 1) * per_program, numel)
    for i in range(pid * per_program, end, CHUNK):
        offsets = i + tl.arange(0, CHUNK)
        expert = _load_experts(topk_ids, expert_map, offsets, end, num_experts, IGNORE_REMOTE)
        mine += tl.histogram(expert, EXPERTS, mask=expert < num_experts)
    tl.store(counts + pid * EXPERTS + tl.arange(0, EXPERTS), mine)
    _fill(sorted_ids, numel, pid * CHUNK, num_slots, programs * CHUNK, CHUNK)
    _fill(expert_ids, -1, pid * CHUNK, num_blocks, programs * CHUNK, CHUNK)


@fast
@triton.jit(do_not_specialize=["numel", "per_program"])
def _place(
    topk_ids, expert_map, sorted_ids, expert_ids, num_post_pad, counts, cursors, numel, num_experts, per_program,
    block_size: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr, IGNORE_REMOTE: tl.constexpr,
):  # fmt: skip
    """Write this program's routes behind those of the programs before it."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    e, row = tl.arange(0, EXPERTS), tl.arange(0, ROWS)
    before = tl.zeros((EXPERTS,), tl.int32)
    everywhere = tl.zeros((EXPERTS,), tl.int32)
    for r in range(0, programs, ROWS):
        rows = r + row[:, None]
        part = tl.load(counts + rows * EXPERTS + e[None, :], mask=rows < programs, other=0)
        everywhere += tl.sum(part, 0)
        before += tl.sum(tl.where(rows < pid, part, 0), 0)
    first, blocks, total = _layout(everywhere, block_size)
    mine = cursors + pid * EXPERTS
    tl.store(mine + e, first + before)
    if pid == 0:
        tl.store(num_post_pad, total)
    _store_experts(expert_ids, expert_map, e, first // block_size, blocks, num_experts, pid, programs, HAS_MAP)
    tl.debug_barrier()
    end = tl.minimum((pid + 1) * per_program, numel)
    for i in range(pid * per_program, end, CHUNK):
        offsets = i + tl.arange(0, CHUNK)
        expert = _load_experts(topk_ids, expert_map, offsets, end, num_experts, IGNORE_REMOTE)
        found = expert < num_experts
        slot = tl.atomic_add(mine + expert, 1, mask=found, sem="relaxed", scope="cta")
        tl.store(sorted_ids + slot, offsets, mask=found)


@planned
def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    *,
    small: int = 1024,
    warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.moe.moe_align_block_size`. Up to `small` routes one launch places them."""
    numel = topk_ids.numel()
    num_slots = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        num_slots = cdiv(num_slots, block_size) * block_size
    if numel < num_experts:
        num_slots = min(numel * block_size, num_slots)
    num_blocks = cdiv(num_slots, block_size)
    experts = triton.next_power_of_2(num_experts)
    per_program = max(cdiv(cdiv(numel, _CHUNK), _MAX_PROGRAMS), 1) * _CHUNK
    programs = cdiv(numel, per_program) if numel > small else 0
    new = topk_ids.new_empty
    sorted_ids, expert_ids, num_post_pad = (new(n, dtype=torch.int32) for n in (num_slots, num_blocks, 1))
    rows = new((max(2 * programs, 1), experts), dtype=torch.int32)
    ignores = ignore_invalid_experts and expert_map is not None
    flags = {"EXPERTS": experts, "IGNORE_REMOTE": ignores, "HAS_MAP": expert_map is not None and not ignores}
    if not programs:
        _align_small[(min(_SMALL_PROGRAMS, experts),)](
            topk_ids, expert_map, sorted_ids, expert_ids, num_post_pad, rows, numel, num_blocks, num_experts,
            block_size=block_size, CHUNK=small, num_warps=warps, **flags,
        )  # fmt: skip
        return sorted_ids, expert_ids, num_post_pad
    _count[(programs,)](
        topk_ids, expert_map, sorted_ids, expert_ids, rows, numel, num_slots, num_blocks, num_experts, per_program,
        CHUNK=_CHUNK, num_warps=warps, EXPERTS=experts, IGNORE_REMOTE=ignores,
    )  # fmt: skip
    _place[(programs,)](
        topk_ids, expert_map, sorted_ids, expert_ids, num_post_pad, rows, rows[programs:], numel, num_experts,
        per_program, block_size=block_size, CHUNK=_CHUNK, ROWS=_ROWS, num_warps=warps, **flags,
    )  # fmt: skip
    return sorted_ids, expert_ids, num_post_pad
