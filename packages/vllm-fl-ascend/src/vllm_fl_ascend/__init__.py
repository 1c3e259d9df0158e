"""Ascend backend of vllm-fl: the NPU platform and the operators of torch_npu. Importing this imports neither."""

from vllm_fl.version import __version__

__all__ = ["__version__"]
