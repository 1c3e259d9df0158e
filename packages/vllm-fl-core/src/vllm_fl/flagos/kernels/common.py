"""What the launchers share: rows of strided tensors, sizes of blocks, refusals."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Programs along the second dimension of a grid; the hardware's limit is 65,535.
GRID_ROWS = 32768


class Rows(NamedTuple):
    """The rows of a tensor: `rows` of them; `inner` neighbours are `inner_stride` apart, groups of them `outer_stride`.

    `tensor` is the one to read: the given one, or a copy if its rows have no such layout.
    """

    tensor: Tensor
    rows: int
    inner: int
    outer_stride: int
    inner_stride: int


def power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up. Triton's own function of this name costs a microsecond."""
    return -(-a // b)


def warps_for(elements: int, per_warp: int = 256, most: int = 16) -> int:
    """Warps for a block of so many elements (a power of two)."""
    return min(max(elements // per_warp, 1), most)


def need_unit_stride(name: str, x: Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise NotImplementedError(f"{name}: the last dimension has stride {x.stride(-1)}, expected 1")


def rows_of(name: str, x: Tensor, width: int) -> Rows:
    """The rows of `width` entries of `x`; `width` divides its last dimension.

    Raises:
        NotImplementedError: the last dimension is not contiguous.
    """
    need_unit_stride(name, x)
    if x.numel() == 0:
        return Rows(x, 0, 1, 0, 0)
    size = x.shape[-1]
    rows = x.numel() // width
    # Decided by the number of dimensions alone: by its strides, a batch of one token could take another way than two.
    if x.dim() == 3 and width == size:
        return Rows(x, rows, x.shape[1], x.stride(0), x.stride(1))
    flat = x if x.dim() == 2 else x.reshape(-1, size)
    return Rows(flat, rows, size // width, flat.stride(0), width)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; as many as an H200 where PyTorch does not say."""
    return int(getattr(_properties(device), "multi_processor_count", 132))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; as many as on an H200 where PyTorch does not say."""
    properties = _properties(device)
    most = getattr(properties, "shared_memory_per_block_optin", 0)  # 0 on devices without such a choice
    return int(most or getattr(properties, "shared_memory_per_block", 232448))


def _properties(device: torch.device) -> Any:
    """PyTorch's description of a device; None for the CPU, and for devices without one."""
    describe = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return None if describe is None else describe(device)
