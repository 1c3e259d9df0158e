"""The conditions under which a decision about arguments is remembered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

_PLAIN = (int, float, bool, str, type(None))


def conditions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Dtype, device type, shape and strides of each tensor, type and value of everything else.

    None if an argument cannot be hashed: then nothing is remembered.
    """
    key = tuple([_condition(value) for value in args])
    if kwargs:
        key += tuple([(name, _condition(value)) for name, value in kwargs.items()])
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _condition(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        device = getattr(value, "device", None)
        stride = getattr(value, "stride", None)
        return value.dtype, getattr(device, "type", device), tuple(value.shape), stride() if callable(stride) else None
    if isinstance(value, (list, tuple)):
        return kind, tuple([_condition(item) for item in value])
    return kind, value
