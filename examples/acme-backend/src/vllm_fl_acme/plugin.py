"""What this distribution declares to vllm-fl. It imports neither torch nor vLLM."""

from __future__ import annotations

from vllm_fl.dispatch.types import Availability, BackendImplKind
from vllm_fl.plugins import BackendPlugin


def probe() -> Availability:
    """Whether this machine has the device. Called in every process while vLLM is imported: it has to be cheap."""
    # Every machine has a CPU: this platform is one that is asked for, with VLLM_FL_PLATFORM=acme.
    return Availability(False, "it runs on the CPU, and only if VLLM_FL_PLATFORM=acme asks for it")


PLUGIN = BackendPlugin(
    name="acme",
    kind=BackendImplKind.VENDOR,
    vendor="acme",
    device_type="cpu",
    probe="vllm_fl_acme.plugin:probe",
    register="vllm_fl_acme.register_ops:register_builtins",
    platform="vllm_fl_acme.platform.AcmePlatform",
    config="vllm_fl_acme:acme.yaml",
)
