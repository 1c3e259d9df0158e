"""What vLLM loads: the platform entry point and the general entry point, both named ``fl``.

Nothing of vLLM is imported with this module: vLLM asks for the platform while it is importing itself.
"""

from __future__ import annotations

import os
from contextlib import suppress

from vllm_fl.errors import FLError
from vllm_fl.logging import get_logger

__all__ = ["general_plugin", "platform_plugin"]

SWITCH = "VLLM_FL_PREFER_ENABLED"

#: What the platform probe raised. vLLM swallows an exception of a probe, so it is kept for general_plugin to raise.
_probe_error: Exception | None = None


def switched_off() -> bool:
    """Whether ``VLLM_FL_PREFER_ENABLED`` says no; then vLLM must run as if this distribution were not installed.

    Asked before anything else is read, so that a mistake elsewhere in the configuration cannot matter either.
    """
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "no", "off"}


def platform_plugin() -> str | None:
    """Path of the platform class for this machine, or None to leave the choice to vLLM.

    Called by vLLM in every process, twice. Any error is logged once, with its remedy, and raised by
    :func:`general_plugin`, which vLLM does not guard.
    """
    global _probe_error
    if switched_off():
        return None
    try:
        return _resolve()
    except Exception as error:
        first, _probe_error = _probe_error is None, error
        if first:
            _report(error)
        return None


def _resolve() -> str | None:
    from vllm_fl.config import get_settings
    from vllm_fl.plugins import resolve_platform

    if not get_settings().prefer_enabled:
        return None
    choice = resolve_platform()
    return choice.plugin.platform if choice.plugin else None


def _report(error: Exception) -> None:
    with suppress(FLError):  # the log level itself may be what is wrong
        if isinstance(error, FLError):
            get_logger(__name__).error("%s", error)
        else:
            get_logger(__name__).exception("the choice of a platform failed; please report this as a bug of vllm-fl")


def general_plugin() -> None:
    """Prepare this process: declare our variables, check the version of vLLM, install shims.

    Called by vLLM in every process, perhaps more than once. Does nothing where vLLM runs on a platform of its own.

    Raises:
        FLError: the configuration is wrong; the message says where and what to do.
    """
    from . import compat

    if switched_off():
        compat.declare_environment(only_set=True)
        return
    from vllm.platforms import current_platform

    if _probe_error is not None:
        raise _probe_error.with_traceback(None)
    from .platform import FLPlatform

    if not isinstance(current_platform, FLPlatform):
        compat.declare_environment(only_set=True)
        _warn_if_passed_over(current_platform)
        _warn_of_unused_communicator(current_platform)
        return
    from vllm_fl.config import get_settings
    from vllm_fl.dispatch import get_default_manager

    from . import communication, layers

    # Here and not at first use: inside vLLM's configuration a wrong name would come out as pydantic's error.
    get_default_manager().ensure_initialized()
    _warn_of_version()
    compat.install()
    communication.prepare(type(current_platform))
    # FLWorkerMixin registers the layers, in the worker alone: modules of vLLM's that they extend initialise the device,
    # after which the engine cannot fork.
    if current_platform.worker_cls:
        layers.selected(get_settings())  # for its errors
    else:
        layers.register(current_platform.native_vendor)
        _warn_of_unreplaced_functions(current_platform)


def _warn_if_passed_over(platform: object) -> None:
    ours = platform_plugin()
    if ours is not None:
        _warn_once(
            f"vLLM runs on its own platform {type(platform).__qualname__} and did not ask for {ours}"
            " (VLLM_TARGET_DEVICE=cpu has this effect): operator dispatch is off in this process"
        )


def _warn_of_unused_communicator(platform: object) -> None:
    from vllm_fl.plugins.communicators import SELECTING_VARIABLES

    for variable in SELECTING_VARIABLES:
        if variable in os.environ:
            _warn_once(
                f"environment variable {variable} has no effect: vLLM runs on its own platform"
                f" {type(platform).__qualname__}, with its own communicator; install the distribution of this device"
                " (such as vllm-fl-nvidia), or unset the variable"
            )


def _warn_of_unreplaced_functions(platform: object) -> None:
    from vllm_fl.config import get_settings
    from vllm_fl.flagos.aten import asked_for

    asked, reason = asked_for(get_settings())
    if asked:
        _warn_once(
            f"no ATen function is replaced, although {reason}: the platform {type(platform).__qualname__} names no"
            " worker_cls with FLWorkerMixin, which does it"
        )


def _warn_of_version() -> None:
    from vllm_fl.plugins import vllm_version_warning

    warning = vllm_version_warning()
    if warning is not None:
        _warn_once(warning)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        get_logger(__name__).warning("%s", text)


_warned: set[str] = set()
