"""The cases of flagos_kernels.py."""

from __future__ import annotations

from .base import Case
from .gdn import gated_delta_net
from .general import general

__all__ = ["CASES", "Case"]

CASES: list[Case] = [*gated_delta_net(), *general()]
