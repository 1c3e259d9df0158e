"""The mark of an operator that still computes what the reference computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_ATTRIBUTE = "_fl_reference_based"


def reference_based(fn: _F) -> _F:
    """Mark an implementation as one that calls the reference until a kernel takes its place; reports say so."""
    setattr(fn, _ATTRIBUTE, True)
    return fn


def is_reference_based(fn: Callable[..., Any]) -> bool:
    """Whether an implementation, or what it wraps, has the mark."""
    return bool(getattr(fn, _ATTRIBUTE, False))
