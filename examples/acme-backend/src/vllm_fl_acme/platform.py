"""What vLLM asks of the platform."""

from __future__ import annotations

from vllm_fl_reference.platform import ReferencePlatform


class AcmePlatform(ReferencePlatform):
    """vLLM on this machine's processors, with Acme's operators.

    For a device of your own derive from :class:`vllm_fl.integration.platform.OutOfTreePlatform`, set ``device_type``,
    ``device_name``, ``dispatch_key``, ``dist_backend``, ``device_control_env_var`` and ``worker_cls``, and answer for
    the device as ReferencePlatform does for the CPU; `vllm-fl new-backend` with `--device` writes the frame of it.
    """
