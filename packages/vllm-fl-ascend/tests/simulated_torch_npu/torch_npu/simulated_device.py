"""The device: ``torch.npu`` with what vLLM and vllm-fl call, and tensors on ``npu`` that are CPU tensors."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GIB = 1 << 30
TOTAL = 64 * GIB
FREE = 62 * GIB


class Stream:
    """Everything is done when a call returns."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        """There are no others to be ordered with."""

    @property
    def device(self) -> torch.device:
        return torch.device("npu", 0)

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)


class Event:
    """As of torch_npu: it has to be recorded before it is waited for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class NPUGraph:
    """Nothing can be captured here."""

    def __init__(self) -> None:
        raise RuntimeError("simulated torch_npu: there are no graphs in the simulation")


_current = Stream()
npu = types.ModuleType("torch_npu.npu", "Simulated torch.npu: one device.")


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index != 0:
        raise RuntimeError(f"simulated torch_npu: set_device({device!r}): there is one device")


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What has no effect here."""


vars(npu).update(
    Stream=Stream,
    Event=Event,
    NPUGraph=NPUGraph,
    graph=_nothing,
    graph_pool_handle=lambda: (0, 0),
    is_current_stream_capturing=lambda: False,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=_set_device,
    current_stream=lambda device=None: _current,
    default_stream=lambda device=None: _current,
    set_stream=_nothing,
    stream=_stream,
    synchronize=_nothing,
    empty_cache=_nothing,
    manual_seed=_nothing,
    manual_seed_all=_nothing,
    reset_peak_memory_stats=_nothing,
    mem_get_info=lambda device=None: (FREE, TOTAL),
    memory_allocated=lambda device=None: 0,
    max_memory_allocated=lambda device=None: 0,
    memory_reserved=lambda device=None: 0,
    memory_stats=lambda device=None: {},
    get_device_name=lambda device=None: "simulated NPU",
    get_device_properties=lambda device=None: types.SimpleNamespace(
        name="simulated NPU", total_memory=TOTAL, cube_core_num=20
    ),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    _is_in_bad_fork=lambda: False,
)


def _on_cpu(value: Any) -> Any:
    """The CPU for a device npu, and anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    if isinstance(value, str) and value.partition(":")[0] == "npu":
        return "cpu"
    return value


class _NpuIsCpu(TorchFunctionMode):
    """Puts tensors on the CPU that are meant for the NPU, and pins none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*(_on_cpu(value) for value in args), **kwargs)


class _Generator(torch.Generator):
    """Made for the NPU, it is one of the CPU."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, device=_on_cpu(device))


def take_npu_for_cpu() -> None:
    """Stand in for what the real torch_npu does when it is imported: device, events, operators by dispatch key, HCCL.

    For a process that serves a model; it stays in force.
    """
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    _NpuIsCpu().__enter__()
    torch.Event = Event  # type: ignore[misc]
    torch.Generator = _Generator  # type: ignore[misc]
    implement = torch.library.Library.impl

    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key != "PrivateUse1":
            return implement(self, op_name, fn, dispatch_key, **options)

        # PyTorch leaves the mode for the call of an operator, and an operator may create tensors.
        @functools.wraps(fn)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _NpuIsCpu():
                return fn(*args, **kwargs)

        return implement(self, op_name, kernel, "CPU", **options)

    torch.library.Library.impl = impl  # type: ignore[method-assign]
    torch.distributed.Backend.register_backend("hccl", _gloo, devices=["npu"])
    for name in ("synchronize", "empty_host_cache", "set_device_index"):
        setattr(torch.accelerator, name, _nothing)
    torch.accelerator.current_device_index = npu.current_device
    # torch_npu may or may not register its allocator with PyTorch; this one does not.
    for name in torch.accelerator.memory.__all__:
        if name != "empty_host_cache":
            setattr(torch.accelerator, name, _no_allocator)


def _no_allocator(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("simulated torch_npu: torch.accelerator has no allocator of the NPU")


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
