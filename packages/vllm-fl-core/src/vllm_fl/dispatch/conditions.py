"""The conditions under which a decision about arguments is remembered.

They are dtype, device, shape and strides of each tensor, and type and value of everything else. Generated code takes
the same facts of the arguments that the specification says are tensors, in less time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Attributes of a tensor that are conditions, as source. The index of a device is cheaper than the device.
TENSOR_FACTS = ("dtype", "is_cpu", "get_device()", "shape", "stride()")
_PLAIN = frozenset({int, float, bool, str, type(None)})


def conditions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The conditions of any call. They cannot be hashed if an argument cannot; then nothing is remembered."""
    key = tuple([condition(value) for value in args])
    if kwargs:
        key += tuple([(name, condition(value)) for name, value in kwargs.items()])
    return key


def condition(value: Any) -> Any:
    """The condition of one argument."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        stride = getattr(value, "stride", None)
        strides = stride() if callable(stride) else None
        return value.dtype, getattr(value, "device", None), tuple(value.shape), strides
    if isinstance(value, (list, tuple)):
        return kind, tuple([condition(item) for item in value])
    return kind, value
