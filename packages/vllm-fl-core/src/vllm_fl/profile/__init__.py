"""Where the time of a run goes: by operator and implementation, and by who provides the device's kernels.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from .coverage import Coverage, KernelUse, Share, coverage
from .kernel_names import KernelNames, installed_kernel_names
from .providers import TRITON, Provider
from .report import Pair, ProfileReport, Row, side_by_side
from .runner import profile_model
from .timeline import Timeline, timeline

__all__ = [
    "TRITON",
    "Coverage",
    "KernelNames",
    "KernelUse",
    "Pair",
    "ProfileReport",
    "Provider",
    "Row",
    "Share",
    "Timeline",
    "coverage",
    "installed_kernel_names",
    "profile_model",
    "side_by_side",
    "timeline",
]
