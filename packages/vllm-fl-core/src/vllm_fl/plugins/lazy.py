"""Implementations that are imported at their first call, so that registering them loads nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_fl.errors import LoadError

from .descriptor import load_object

if TYPE_CHECKING:
    from vllm_fl.dispatch.parameters import Parameter
    from vllm_fl.dispatch.types import Availability


def load_at_first_call(
    name: str, target: str, probe: Callable[[], Availability], parameters: Iterable[Parameter] = ()
) -> Callable[..., Any]:
    """A function with the signature of the operator `name` that loads `target` when it is first called.

    Args:
        name: an operator of the catalogue.
        target: ``"package.module:function"``.
        probe: whether this process can run it; asked by dispatch.
        parameters: those that it declares; its keyword arguments have the same defaults.
    """
    from vllm_fl.catalog import CATALOG

    found: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(_load(target))
        return found[0](*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{target}, imported at the first call."
    signature = CATALOG[name].signature
    own = [inspect.Parameter(p.name, inspect.Parameter.KEYWORD_ONLY, default=p.default) for p in parameters]
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *own]
    )
    call._is_available = probe  # type: ignore[attr-defined]
    return call


def _load(target: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = load_object(target)
    except Exception as error:  # what the module imports may fail in any way
        raise LoadError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error
    return function
