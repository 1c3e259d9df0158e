"""Implementations that are imported at their first call, so that registering them loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .descriptor import load_object

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import Availability


def load_at_first_call(name: str, target: str, probe: Callable[[], Availability]) -> Callable[..., Any]:
    """A function with the signature of the operator `name` that loads `target` when it is first called.

    Args:
        name: an operator of the catalogue.
        target: ``"package.module:function"``.
        probe: whether this process can run it; asked by dispatch.
    """
    from vllm_fl.catalog import CATALOG

    found: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(load_object(target))
        return found[0](*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{target}, imported at the first call."
    call.__signature__ = CATALOG[name].signature  # type: ignore[attr-defined]
    call._is_available = probe  # type: ignore[attr-defined]
    return call
