"""Exceptions of vllm-fl, and the helpers that suggest a name.

A message names the thing that is wrong (variable, or file and line), its value, what is allowed, the nearest match and
the remedy. Every exception derives from :class:`FLError` and from the built-in class that code written for such a
mistake would catch.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


class FLError(Exception):
    """Base of the exceptions that vllm-fl raises on purpose."""


class ConfigError(FLError, ValueError):
    """A setting, token or name in the configuration is wrong."""


class RegistrationError(FLError, ValueError):
    """An implementation cannot be registered."""


class NoImplementationError(FLError, RuntimeError):
    """No implementation of an operator is left; the message holds the selection trace."""


class UnknownOperatorError(FLError, LookupError):
    """The operator is neither in the catalogue nor registered."""


class PlatformError(FLError, RuntimeError):
    """No platform, or more than one, fits this machine."""


class FrozenError(FLError, RuntimeError):
    """The selection is frozen (after compilation or graph capture) and may not change."""


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option most like `name`, or None if none is at all like it.

    Case does not count, nor do ``-`` and ``_`` differ. Ties go to the option that comes first in sorted order.
    """

    def fold(text: str) -> str:
        return text.casefold().replace("-", "_")

    best, best_ratio = None, 0.6
    for option in sorted(set(options)):
        ratio = SequenceMatcher(None, fold(name), fold(option)).ratio()
        if ratio > best_ratio:
            best, best_ratio = option, ratio
    return best


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` with the nearest option, or ``""`` if there is none."""
    match = nearest(name, options)
    return f"; did you mean {match!r}?" if match else ""
