"""Which kernels the installed vLLM holds. Nothing is loaded to find out."""

from __future__ import annotations

import importlib

from vllm_fl.dispatch.types import AVAILABLE, Availability
from vllm_fl.plugins import native

#: vLLM's CUDA extensions in the releases 0.26 to 0.33: of kernels for any model, and for mixtures of experts.
_EXTENSIONS = ("_C_stable_libtorch", "_C")
_MOE_EXTENSIONS = ("_moe_C_stable_libtorch", "_moe_C")


def is_compiled() -> bool:
    """Whether vLLM was built with its CUDA kernels; a build with ``VLLM_TARGET_DEVICE=empty`` was not."""
    return native.has_kernels(*(f"{name}.*so" for name in _EXTENSIONS))


def compiled() -> Availability:
    """Whether the compiled kernels can be called; loads them."""
    return _loaded(_EXTENSIONS)


def compiled_moe() -> Availability:
    """The same of the kernels for mixtures of experts."""
    return _loaded(_MOE_EXTENSIONS)


def _loaded(names: tuple[str, ...]) -> Availability:
    if not native.has_kernels(*(f"{name}.*so" for name in names)):
        return Availability(False, f"vLLM is not installed with its CUDA kernels ({' or '.join(names)})")
    errors = []
    for name in names:
        try:
            importlib.import_module(f"vllm.{name}")
        except ImportError as error:
            errors.append(f"{name}: {error}")
        else:
            return AVAILABLE
    return Availability(False, f"vLLM's CUDA kernels do not load ({'; '.join(errors)}); reinstall vLLM")
