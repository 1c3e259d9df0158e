"""Large zeros that take memory when they are written, not when they are made.

PyTorch writes the zeros of a new tensor, a second and more a GiB, and a KV cache is gigabytes of which a short run uses
little. The system hands out zeroed pages by itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["LazyZeros"]


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
