"""What depends on the kind of device: its current stream, and what FlagCX's kernels need to know of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from .agreement import DeviceFacts
from .errors import CommunicationError
from .policy import NOT_CAPTURABLE

__all__ = ["device_facts", "device_selector", "is_capturing", "stream_getter", "stream_outside_graphs"]

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h


def stream_getter(device: torch.device) -> Callable[[], int]:
    """A function that gives the raw handle of the device's current stream; 0 on a CPU."""
    if device.type == "cpu":
        return lambda: 0
    fast = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
    if fast is not None:
        index = device.index or 0
        return lambda: fast(index)
    module, name = torch.get_device_module(device), f"{device.type}_stream"
    return lambda: getattr(module.current_stream(device), name)


def stream_outside_graphs(device: torch.device) -> Callable[[], int]:
    """As :func:`stream_getter`, for operations that cannot be captured: the function raises while a graph is."""
    stream = stream_getter(device)

    def get() -> int:
        if is_capturing(device):
            raise CommunicationError(NOT_CAPTURABLE)
        return stream()

    return get


def device_selector(device: torch.device) -> Callable[[], None] | None:
    """A function that makes the device the current one of the calling thread; None on a CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return lambda: module.set_device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    if device.type == "cpu":
        return False
    ask: Any = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(ask is not None and ask())


def device_facts(device: torch.device) -> DeviceFacts:
    """Multicast and compute capability of a CUDA device; nothing is known of others. Only asks, switches nothing on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return DeviceFacts()
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFacts(_has_multicast(device), (major, minor))


def _has_multicast(device: torch.device) -> bool:
    driver = ctypes.CDLL("libcuda.so.1")
    handle, answer = ctypes.c_int(), ctypes.c_int()
    # By bus id, since the driver may count devices otherwise than the process does.
    place = torch.cuda.get_device_properties(device)
    bus = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0".encode()
    if driver.cuDeviceGetByPCIBusId(ctypes.byref(handle), bus):
        return False
    return not driver.cuDeviceGetAttribute(ctypes.byref(answer), _MULTICAST_SUPPORTED, handle) and bool(answer.value)
