"""What the configuration and the environment say about communication, and what in it contradicts itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_fl.config import get_settings
from vllm_fl.errors import ConfigError

from .policy import Thresholds

CUSTOM_ENV = "FLAGCX_CUSTOM_OP_ENABLE"
MULTICAST_ENV = "NCCL_NVLS_ENABLE"

__all__ = ["CUSTOM_ENV", "MULTICAST_ENV", "CommSettings", "comm_settings"]


@dataclass(frozen=True)
class CommSettings:
    """Settings of one process.

    Args:
        timeout: seconds that an operation may take.
        custom_all_reduce: FlagCX's custom kernels are asked for.
        asked_by: the place that asks for them, or says no.
        multicast_allowed: NVLink multicast may be used.
        thresholds: of the custom kernels.
    """

    timeout: float
    custom_all_reduce: bool
    asked_by: str
    multicast_allowed: bool
    thresholds: Thresholds


def comm_settings() -> CommSettings:
    """The settings of this process.

    Raises:
        ConfigError: a variable has a value that FlagCX does not know, or custom kernels are asked for where multicast
            is forbidden.
    """
    settings = get_settings()
    variable = _switch(CUSTOM_ENV)
    if settings.comm_custom_all_reduce is not None:
        custom, asked_by = settings.comm_custom_all_reduce, str(settings.origin("comm_custom_all_reduce"))
    else:
        custom, asked_by = bool(variable), f"environment variable {CUSTOM_ENV}" if variable is not None else "default"
    allowed = os.environ.get(MULTICAST_ENV, "").strip() != "0"
    if custom and not allowed:
        raise ConfigError(
            f"{asked_by} asks for FlagCX's custom all-reduce, and environment variable {MULTICAST_ENV}=0 says that"
            " NVLink multicast must stay off, which FlagCX's kernels use all the same; remove one of the two"
        )
    thresholds = Thresholds(custom=settings.comm_custom_max_bytes)
    return CommSettings(settings.comm_timeout, custom, asked_by, allowed, thresholds)


def _switch(name: str) -> bool | None:
    value = os.environ.get(name)
    if value is not None and value.strip() not in ("0", "1"):
        raise ConfigError(f"environment variable {name}: {value!r} is not 0 or 1")
    return None if value is None else value.strip() == "1"
