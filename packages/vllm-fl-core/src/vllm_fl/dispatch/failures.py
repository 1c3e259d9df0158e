"""Failures of implementations: which ones allow to try another, and what is kept of them."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fl.catalog import OpSpec
from vllm_fl.errors import LoadError

from . import forks
from .types import dtype_name

_DEVICE_FAULT = re.compile(
    r"\b(CUDA|HIP|NPU|ACL|MUSA|XPU|CNNL?|device) (function )?error\b|\bdevice-side assert|\billegal memory access"
    r"|\bC(UBLAS|UDNN)_STATUS_",
    re.IGNORECASE,
)
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class FailureRecord:
    """The first failure of one implementation.

    Args:
        op: the operator.
        impl_id: the implementation.
        shapes: shape of each tensor argument, by its name or position.
        dtypes: name of the dtype of each tensor argument.
        exception: type and text of the exception.
        traceback: the whole traceback.
        time: seconds since the epoch.
        outcome: what happened to the call.
    """

    op: str
    impl_id: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    exception: str
    traceback: str
    time: float
    outcome: str

    def __str__(self) -> str:
        tensors = ", ".join(f"{name} {list(shape)} {self.dtypes[name]}" for name, shape in self.shapes.items())
        return f"{self.op}: implementation {self.impl_id!r} raised {self.exception} ({tensors or 'no tensors'})"


class FailureLog:
    """First failures by (operator, implementation)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str], FailureRecord] = {}
        forks.reset_in_child(self)

    def add(self, record: FailureRecord) -> bool:
        """Keep `record` if it is the first of its implementation; whether it was."""
        with self._lock:
            return self._records.setdefault((record.op, record.impl_id), record) is record

    def known(self, op_name: str, impl_id: str) -> bool:
        return (op_name, impl_id) in self._records

    def records(self) -> list[FailureRecord]:
        """All records, oldest first."""
        return sorted(self._records.copy().values(), key=lambda record: record.time)

    def clear(self, op_name: str | None = None) -> None:
        """Forget the records of one operator, or all."""
        with self._lock:
            for key in [key for key in self._records if op_name in (None, key[0])]:
                del self._records[key]

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()


def make_record(
    op_name: str, impl_id: str, error: BaseException, arguments: Mapping[str, Any], outcome: str
) -> FailureRecord:
    """The record of `error`; nothing of the arguments is kept alive."""
    tensors = {name: value for name, value in arguments.items() if is_tensor(value)}
    return FailureRecord(
        op=op_name,
        impl_id=impl_id,
        shapes={name: tuple(value.shape) for name, value in tensors.items()},
        dtypes={name: dtype_name(value.dtype) for name, value in tensors.items()},
        exception=describe(error),
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        time=time.time(),
        outcome=outcome,
    )


def name_arguments(spec: OpSpec | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the parameter names of the specification, or by position without one."""
    names = list(spec.signature.parameters) if spec is not None else []
    named = {names[i] if i < len(names) else f"argument {i + 1}": value for i, value in enumerate(args)}
    return {**named, **kwargs}


def describe(error: BaseException) -> str:
    """``ValueError: text`` in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """``BaseException.add_note``; on Python 3.10 the notes are kept in the same attribute but not printed."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        setattr(error, "__notes__", [*getattr(error, "__notes__", ()), note])  # noqa: B010


def is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def cannot_retry(
    error: Exception, spec: OpSpec | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], strict: bool
) -> str | None:
    """Why no other implementation may be tried after `error`; None if one may."""
    if strict:
        return "the policy is strict"
    if isinstance(error, LoadError):
        return None
    if is_out_of_memory(error):
        return "memory ran out"
    if is_device_fault(error):
        return "the device is at fault"
    if spec is not None and spec.mutates:
        return f"it may have written to {', '.join(spec.mutates)}"
    if spec is None and not all(isinstance(value, _IMMUTABLE) for value in (*args, *kwargs.values())):
        return "it may have written to its arguments: the operator has no OpSpec that says otherwise"
    if is_capturing():
        return "a graph is being captured"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, ``torch.OutOfMemoryError``, or the RuntimeError of a device that says so in words."""
    if isinstance(error, (MemoryError, *_torch_classes("OutOfMemoryError"))):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def is_device_fault(error: BaseException) -> bool:
    """``torch.AcceleratorError``, or the RuntimeError of a driver: the device's state is not to be trusted."""
    if isinstance(error, _torch_classes("AcceleratorError")):
        return True
    return isinstance(error, RuntimeError) and _DEVICE_FAULT.search(str(error)) is not None


def is_capturing() -> bool:
    """Whether the present stream of an initialised accelerator is capturing a graph. Never imports torch."""
    torch: Any = sys.modules.get("torch")
    names = {"cuda"}
    if accelerator := getattr(torch, "accelerator", None):
        device = accelerator.current_accelerator()
        names |= {device.type} if device is not None else set()
    for name in names:
        module: Any = getattr(torch, name, None)
        ask = getattr(module, "is_current_stream_capturing", None)
        if ask is not None and module.is_initialized() and ask():
            return True
    return False


def _torch_classes(name: str) -> tuple[type[BaseException], ...]:
    found = getattr(sys.modules.get("torch"), name, None)
    return (found,) if isinstance(found, type) else ()
