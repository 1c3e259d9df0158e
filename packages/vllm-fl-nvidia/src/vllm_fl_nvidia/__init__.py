"""NVIDIA backend of vllm-fl: the CUDA platform, and vLLM's compiled kernels as implementations of kind vendor."""

from vllm_fl.version import __version__

__all__ = ["__version__"]
