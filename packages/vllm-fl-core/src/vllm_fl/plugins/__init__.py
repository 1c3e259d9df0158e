"""The installed backends, and which of them is the platform. Everything here is judged from metadata and cheap probes.

Neither torch nor vllm is imported, so that vLLM may call it while it is being imported itself.
"""

from __future__ import annotations

from .communicators import (
    COMMUNICATOR_GROUP,
    CommunicatorChoice,
    CommunicatorPlugin,
    InstalledCommunicator,
    choose_communicator,
    communicator_class,
    installed_communicators,
)
from .descriptor import BackendPlugin, load_object
from .lazy import load_at_first_call
from .loading import BACKEND_GROUP, InstalledBackend, installed_backends, platform_file, reset_plugins
from .native import has_native_platform
from .platform import PLATFORM_ENV, PlatformChoice, probe, reset_platform, resolve_platform
from .requirements import SUPPORTED_VLLM, installed_vllm, requirement_problem, vllm_version_warning

__all__ = [
    "BACKEND_GROUP",
    "COMMUNICATOR_GROUP",
    "PLATFORM_ENV",
    "SUPPORTED_VLLM",
    "BackendPlugin",
    "CommunicatorChoice",
    "CommunicatorPlugin",
    "InstalledBackend",
    "InstalledCommunicator",
    "PlatformChoice",
    "choose_communicator",
    "communicator_class",
    "has_native_platform",
    "installed_backends",
    "installed_communicators",
    "installed_vllm",
    "load_at_first_call",
    "load_object",
    "platform_file",
    "probe",
    "requirement_problem",
    "reset_platform",
    "reset_plugins",
    "resolve_platform",
    "vllm_version_warning",
]
