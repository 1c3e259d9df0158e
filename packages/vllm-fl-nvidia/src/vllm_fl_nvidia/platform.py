"""`NvidiaPlatform`: of two classes the one that fits the installed vLLM, with its CUDA kernels or without."""

from __future__ import annotations

from .kernels import is_compiled

__all__ = ["NvidiaPlatform"]

if is_compiled():
    from .platforms.compiled import CompiledNvidiaPlatform as NvidiaPlatform
else:
    from .platforms.triton_only import TritonNvidiaPlatform as NvidiaPlatform
