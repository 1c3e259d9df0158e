"""The thin prober outside the pure selection: facts about this process, each asked once per registry generation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .registry import OpRegistrySnapshot
from .selection import Environment
from .types import Availability, OpImpl


class Availabilities(Mapping[tuple[str, str], Availability]):
    """(operator, impl_id) to availability, asked when looked up and remembered.

    Implementations that share a probe, as those of one backend do, are asked once.
    """

    def __init__(self, snapshot: OpRegistrySnapshot) -> None:
        self._impls = {(op, impl.impl_id): impl for op, impls in snapshot.impls_by_op.items() for impl in impls}
        self._answers: dict[Any, Availability] = {}

    def __getitem__(self, key: tuple[str, str]) -> Availability:
        impl = self._impls[key]
        probe = _identity(impl)
        answer = self._answers.get(probe)
        if answer is None:
            answer = self._answers.setdefault(probe, impl.availability())
        return answer

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._impls)

    def __len__(self) -> int:
        return len(self._impls)


def _identity(impl: OpImpl) -> Any:
    try:
        hash(impl.probe)
    except TypeError:
        return impl.op_name, impl.impl_id
    return impl.probe


def probe_environment(snapshot: OpRegistrySnapshot) -> Environment:
    """The facts that select() needs; a device is asked only if an implementation needs a certain capability."""
    wanted = any(impl.min_arch is not None for impls in snapshot.impls_by_op.values() for impl in impls)
    device_type = _device_type() if wanted else None
    arch = _device_capability(device_type) if wanted else None
    return Environment(device_type, arch, Availabilities(snapshot))


def _device_type() -> str | None:
    from vllm_fl.plugins import resolve_platform

    plugin = resolve_platform().plugin
    return plugin.device_type if plugin is not None else None


def _device_capability(device_type: str | None) -> int | None:
    """``major * 10 + minor`` of the device, or None.

    vLLM's platform is asked first if vLLM is in use: it answers without initialising the device, which a process that
    forks its workers must not do.
    """
    platform = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    if platform is not None:
        capability = platform.get_device_capability()
        return int(capability.to_int()) if capability is not None else None
    torch: Any = sys.modules.get("torch")
    device: Any = getattr(torch, device_type or "cuda", None)
    ask = getattr(device, "get_device_capability", None)
    if ask is None or not device.is_available():
        return None
    try:
        major, minor = ask()
    except (RuntimeError, TypeError, ValueError):  # a device without capabilities of this form
        return None
    return int(major) * 10 + int(minor)
