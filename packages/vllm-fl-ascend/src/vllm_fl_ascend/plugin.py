"""What this distribution declares to vllm-fl under the entry-point group ``vllm_fl.backends``."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_fl.dispatch.types import AVAILABLE, Availability, BackendImplKind, BackendPriority, OpImpl
from vllm_fl.plugins import BackendPlugin

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

#: Where the driver puts ``davinci0``, ``davinci1`` and so on, one node a device.
DEVICE_FOLDER = Path("/dev")
VENDOR = "ascend"

PLUGIN = BackendPlugin(
    name="ascend",
    kind=BackendImplKind.VENDOR,
    vendor=VENDOR,
    device_type="npu",
    probe="vllm_fl_ascend.plugin:probe",
    register="vllm_fl_ascend.plugin:register",
    platform="vllm_fl_ascend.platform.AscendPlatform",
    config="vllm_fl_ascend:ascend.yaml",
)


def probe() -> Availability:
    """Whether there is a torch_npu that fits torch, and a device. Imports neither of them, starts no device."""
    if find_spec("torch_npu") is None:
        return Availability(False, "torch_npu is not installed; install the torch-npu of torch's version")
    problem = _version_problem()
    if problem:
        return Availability(False, problem)
    if not any(re.fullmatch(r"davinci\d+", path.name) for path in DEVICE_FOLDER.glob("davinci*")):
        return Availability(
            False,
            f"no device node {DEVICE_FOLDER}/davinci<N>: the Ascend driver is not loaded, or a container was started"
            " without its devices",
        )
    return AVAILABLE


def _version_problem() -> str | None:
    """torch_npu is built for one minor version of torch; another one fails while it is being loaded."""
    versions = {}
    for name in ("torch", "torch_npu"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            return None  # built from source without metadata: only the import can tell
    minor = {name: text.split("+")[0].split(".")[:2] for name, text in versions.items()}
    if minor["torch"] == minor["torch_npu"]:
        return None
    wanted = ".".join(minor["torch"])
    return (
        f"torch_npu {versions['torch_npu']} is not for torch {versions['torch']}; pip install 'torch-npu=={wanted}.*'"
    )


def register(registry: OpRegistry) -> None:
    """Register the operators that torch_npu has. Imports torch, not torch_npu."""
    from .ops import OPERATORS

    registry.register_many(
        [
            OpImpl(
                op_name=operator.fn.__name__,
                impl_id=operator.impl_id,
                kind=BackendImplKind.VENDOR,
                vendor=VENDOR,
                fn=operator.fn,
                priority=BackendPriority.VENDOR - operator.rank,
                supported_dtypes=operator.dtypes,
                opaque=operator.opaque,
            )
            for operator in OPERATORS
        ]
    )
