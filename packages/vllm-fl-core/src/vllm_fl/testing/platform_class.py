"""What vLLM asks of a platform class: attributes, methods that its base leaves open, answers of the device methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm_fl.plugins import BackendPlugin, load_object

from .imports import unimportable

_ATTRIBUTES = ("device_name", "device_type", "dispatch_key", "dist_backend", "device_control_env_var")
#: Methods that vLLM calls and that its base class leaves open, with what it calls them for.
_REQUIRED = {
    "get_device_name": "messages and tuned configurations",
    "get_device_total_memory": "the size of the KV cache",
    "get_current_memory_usage": "memory reports",
    "set_device": "each worker",
    "manual_seed_all": "the seed of the device",
    "check_if_supports_dtype": "the dtype of the model",
    "num_compute_units": "the grids of kernels",
}
#: What vLLM takes from ``torch.<device_type>``, unless the platform has it.
_MODULE = ("current_device", "current_stream", "device_count", "synchronize")


def problems_of(plugin: BackendPlugin, is_here: bool) -> Iterator[str]:
    """What the platform class of a backend lacks, or answers wrongly.

    Args:
        plugin: the backend.
        is_here: whether the device is on this machine, so that its methods can be called.
    """
    from vllm.platforms.interface import Platform

    from vllm_fl.integration.platform import FLPlatform

    path = str(plugin.platform)
    problem = unimportable(path)
    if problem is not None:
        yield problem
        return
    cls = load_object(":".join(path.rpartition(".")[::2]))
    if not (isinstance(cls, type) and issubclass(cls, FLPlatform)):
        yield f"{path} is not a subclass of vllm_fl.integration.platform.FLPlatform"
        return
    for name in _ATTRIBUTES:
        if not getattr(cls, name, None):
            yield f"{path}.{name} is not set"
    for name, purpose in _REQUIRED.items():
        if _function(cls, name) is _function(Platform, name):
            yield f"{path}.{name} is not defined; vLLM calls it for {purpose}"
    yield from _paths(cls)
    if is_here:
        yield from _answers(cls, path)
        if plugin.device_type not in (None, cls.device_type):
            yield f"{path}.device_type is {cls.device_type!r}, the backend declares {plugin.device_type!r}"


def _function(cls: type, name: str) -> Any:
    method = getattr(cls, name, None)
    return getattr(method, "__func__", method)


def _paths(cls: Any) -> Iterator[str]:
    """Classes that the platform names and that are not there."""
    names = ["get_device_communicator_cls"]
    if cls.support_static_graph_mode():
        names.append("get_static_graph_wrapper_cls")
    if cls.worker_cls and (problem := unimportable(cls.worker_cls)):
        yield f"worker_cls: {problem}"
    for name in names:
        try:
            problem = unimportable(getattr(cls, name)())
        except Exception as error:  # a vendor's method may fail in any way
            problem = f"raised {type(error).__name__}: {error}"
        if problem:
            yield f"{name}(): {problem}"


def _answers(cls: Any, path: str) -> Iterator[str]:
    import torch

    platform = cls()
    module = torch.get_device_module(cls.device_type)
    for name in _MODULE:
        # The platform's own attribute, since its __getattr__ would look into the module.
        if not hasattr(cls, name) and not hasattr(module, name):
            yield f"neither {path} nor torch.{cls.device_type} has {name}, which vLLM calls"
    device = (
        torch.device(cls.device_type, module.current_device()) if _has_index(module) else torch.device(cls.device_type)
    )
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any], bool], str]] = {
        "get_device_name(0)": (lambda: platform.get_device_name(0), _is_text, "a text"),
        "get_device_total_memory(0)": (lambda: platform.get_device_total_memory(0), _is_positive, "bytes"),
        "get_current_memory_usage()": (platform.get_current_memory_usage, _is_number, "bytes"),
        "num_compute_units(0)": (lambda: platform.num_compute_units(0), _is_positive, "a positive number"),
        "is_pin_memory_available()": (platform.is_pin_memory_available, _is_bool, "a bool"),
        "supported_dtypes": (lambda: platform.supported_dtypes, bool, "dtypes"),
        "set_device()": (lambda: platform.set_device(device), _is_none, "None"),
        "manual_seed_all(0)": (lambda: platform.manual_seed_all(0), _is_none, "None"),
        "inference_mode()": (lambda: _entered(platform.inference_mode()), _is_none, "a context manager"),
    }
    for name, (call, accept, expected) in calls.items():
        try:
            answer = call()
        except Exception as error:  # a vendor's method may fail in any way
            yield f"{path}.{name} raised {type(error).__name__}: {error}"
            continue
        if not accept(answer):
            yield f"{path}.{name} returned {answer!r}, expected {expected}"


def _has_index(module: Any) -> bool:
    return isinstance(module.current_device(), int)


def _entered(context: Any) -> None:
    with context:
        pass


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_none(value: Any) -> bool:
    return value is None
