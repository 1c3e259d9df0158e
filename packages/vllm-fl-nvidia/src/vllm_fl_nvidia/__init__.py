"""NVIDIA backend of vllm-fl: a skeleton that registers no operators and no platform yet."""

from vllm_fl.version import __version__

__all__ = ["__version__"]
