"""Large zeros that take memory when they are written, not when they are made.

PyTorch writes the zeros of a new tensor, a second and more a GiB, and a KV cache is gigabytes of which a short run uses
little. The system hands out zeroed pages by itself, and takes them back.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .hugepages import advise

__all__ = ["LazyZeros", "release_pages"]

_MADV_DONTNEED = 4  # <linux/mman.h>


class LazyZeros(TorchFunctionMode):
    """While active, ``torch.zeros`` of `minimum` bytes or more on the CPU maps fresh pages instead of writing them.

    Args:
        minimum: bytes below which PyTorch's own allocator serves.
    """

    def __init__(self, minimum: int = 8 << 20) -> None:
        super().__init__()
        self.minimum = minimum

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and hasattr(mmap, "MAP_ANONYMOUS"):
            like = torch.empty(*args, **{**kwargs, "device": "meta"})
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            if device.type == "cpu" and like.nbytes >= self.minimum and set(kwargs) <= {"dtype", "device"}:
                memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
        return func(*args, **kwargs)


def release_pages(tensors: Iterable[Tensor]) -> int:
    """Give the memory under CPU tensors back to the system (Linux only); their whole pages read as zeros afterwards.

    Returns:
        Bytes that were given back, whether or not they had been written.
    """
    if not sys.platform.startswith("linux"):
        return 0
    size = 0
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for address, storage in storages.items():
        start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + storage.nbytes()
        length = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and advise(start, length, _MADV_DONTNEED):
            size += length
    return size
