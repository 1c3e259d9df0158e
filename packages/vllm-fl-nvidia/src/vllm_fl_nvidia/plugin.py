"""What this distribution declares to vllm-fl under the entry-point group ``vllm_fl.backends``."""

from __future__ import annotations

from vllm_fl.dispatch.types import Availability, BackendImplKind
from vllm_fl.plugins import BackendPlugin

NO_OPERATORS = "no operators yet: this release registers no operators and no platform"


def probe() -> Availability:
    """Always no, whatever hardware is present: there is nothing here that could run on it."""
    return Availability(False, NO_OPERATORS)


PLUGIN = BackendPlugin(
    name="nvidia",
    kind=BackendImplKind.VENDOR,
    vendor="nvidia",
    device_type="cuda",
    probe="vllm_fl_nvidia.plugin:probe",
    config="vllm_fl_nvidia:nvidia.yaml",
)
