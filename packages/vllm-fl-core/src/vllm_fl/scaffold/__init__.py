"""Writes a new backend distribution: everything that a vendor's repository needs, from templates in this package."""

from __future__ import annotations

from .generator import NewBackend, write

__all__ = ["NewBackend", "write"]
