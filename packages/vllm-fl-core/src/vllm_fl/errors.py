"""Exceptions of vllm-fl, and the helpers that suggest a name.

A message names the thing that is wrong (variable, or file and line), its value, what is allowed, the nearest match and
the remedy. Every exception derives from :class:`FLError` and from the built-in class that code written for such a
mistake would catch.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every ``vllm-fl`` command, which a script can rely on."""

    OK = 0
    FAILED = 1
    """The command ran and failed: an engine or server that does not start, no implementation of an operator."""
    USAGE = 2
    """Wrong arguments or configuration."""
    MISSING = 3
    """The machine lacks something: a package, the network, disk space."""
    INTERRUPTED = 130
    """Ctrl-C."""


class FLError(Exception):
    """Base of the exceptions that vllm-fl raises on purpose; a command that one ends has its exit code."""

    exit_code: Exit = Exit.FAILED


class ConfigError(FLError, ValueError):
    """A setting, token or name in the configuration is wrong."""

    exit_code = Exit.USAGE


class RegistrationError(FLError, ValueError):
    """An implementation cannot be registered."""


class LoadError(FLError, ImportError):
    """An implementation cannot be imported; nothing has been computed, and nothing written."""


class NoImplementationError(FLError, RuntimeError):
    """No implementation of an operator is left; the message holds the selection trace."""


class UnknownOperatorError(FLError, LookupError):
    """The operator is neither in the catalogue nor registered."""

    exit_code = Exit.USAGE


class PlatformError(FLError, RuntimeError):
    """No platform, or more than one, fits this machine."""


class FrozenError(FLError, RuntimeError):
    """The selection is frozen (after compilation or graph capture) and may not change."""


class CommandError(FLError, RuntimeError):
    """A failure of a tool that the user can act on.

    Args:
        message: what happened, with the names and values concerned.
        remedy: what to do about it.
        code: the exit code.
        log: the file that has the details, if there is one.
    """

    def __init__(self, message: str, remedy: str = "", code: Exit = Exit.FAILED, log: object = None) -> None:
        super().__init__(message)
        self.message, self.remedy, self.log = message, remedy, log
        self.code = self.exit_code = code

    def __str__(self) -> str:
        lines = [self.message]
        if self.remedy:
            lines.append(f"Remedy: {self.remedy}")
        if self.log:
            lines.append(f"Log: {self.log}")
        return "\n".join(lines)


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
