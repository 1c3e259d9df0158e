"""Which kernels the installed vLLM holds. Nothing is loaded to find out."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from vllm_fl.dispatch.types import AVAILABLE, Availability

#: vLLM's CUDA extensions of kernels for any operator, in the releases 0.26 to 0.33.
EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._C")
MOE_EXTENSIONS = ("vllm._moe_C_stable_libtorch", "vllm._moe_C")


@functools.cache
def is_compiled() -> bool:
    """Whether vLLM was built with its CUDA kernels; a build with ``VLLM_TARGET_DEVICE=empty`` was not."""
    try:
        return any(importlib.util.find_spec(name) is not None for name in EXTENSIONS)
    except ImportError:  # no vLLM at all
        return False


def compiled() -> Availability:
    """Whether the compiled kernels can be called; loads them."""
    return _loaded(EXTENSIONS)


def compiled_moe() -> Availability:
    """The same of the kernels for mixtures of experts."""
    return _loaded(MOE_EXTENSIONS)


def _loaded(names: tuple[str, ...]) -> Availability:
    errors = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
        else:
            return AVAILABLE
    return Availability(False, f"vLLM was installed without its CUDA kernels ({'; '.join(errors)})")
