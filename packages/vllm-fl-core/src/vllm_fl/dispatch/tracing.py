"""Is torch.compile tracing this code? Answered without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def runs_while_tracing(fn: _F) -> _F:
    """Mark `fn` to be run, not traced, when Dynamo meets it; its result (None, bool, int, str) becomes a constant.

    The mark is that of ``torch.compiler.assume_constant_result``, set without importing torch.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@runs_while_tracing
def is_compiling() -> bool:
    compiler = _torch_compiler()
    return compiler is not None and bool(compiler.is_compiling())


def fast_is_compiling() -> Callable[[], bool]:
    """As :func:`is_compiling` and cheaper to call; only for code that is rebuilt if torch is imported later."""
    compiler = _torch_compiler()
    return is_compiling if compiler is None else compiler.is_dynamo_compiling


def _torch_compiler() -> Any:
    """``torch.compiler``, or None while torch is not imported, or not yet whole."""
    return getattr(sys.modules.get("torch"), "compiler", None)
