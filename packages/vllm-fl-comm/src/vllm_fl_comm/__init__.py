"""FlagCX communication of vllm-fl: a skeleton that offers no communicator yet."""

from vllm_fl.version import __version__

__all__ = ["__version__"]
