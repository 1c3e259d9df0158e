"""Where the time of a run goes: by operator and implementation, and by who provides the device's kernels.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from .coverage import Coverage, KernelUse, Share, coverage
from .kernel_names import KernelNames, installed_kernel_names
from .providers import TRITON, Provider

__all__ = [
    "TRITON",
    "Coverage",
    "KernelNames",
    "KernelUse",
    "Provider",
    "Share",
    "coverage",
    "installed_kernel_names",
]
