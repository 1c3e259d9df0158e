"""Conformance of a backend: is every operator that it registers what the catalogue says, and is its platform complete?

The checks are functions and need no pytest. ``vllm-fl conformance`` runs them from the command line; the pytest plug-in
:mod:`vllm_fl.testing.plugin` makes a test of each. Importing this imports nothing else: pytest does so in every run,
whatever is tested.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allowlist import AllowList, KnownGap
    from .conformance import Item, Kit, Options, check_implementation, run
    from .marks import reference_based
    from .results import CHECKS, PLATFORM_CHECKS, CheckResult, Report, Status, Subject, Violation
    from .subjects import Bundle, MissingReferenceError, find_bundles

_MODULES = {
    "allowlist": ("AllowList", "KnownGap"),
    "conformance": ("Item", "Kit", "Options", "check_implementation", "run"),
    "marks": ("reference_based",),
    "results": ("CHECKS", "PLATFORM_CHECKS", "CheckResult", "Report", "Status", "Subject", "Violation"),
    "subjects": ("Bundle", "MissingReferenceError", "find_bundles"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CHECKS",
    "PLATFORM_CHECKS",
    "AllowList",
    "Bundle",
    "CheckResult",
    "Item",
    "Kit",
    "KnownGap",
    "MissingReferenceError",
    "Options",
    "Report",
    "Status",
    "Subject",
    "Violation",
    "check_implementation",
    "find_bundles",
    "reference_based",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
