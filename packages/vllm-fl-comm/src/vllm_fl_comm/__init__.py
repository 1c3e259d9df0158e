"""FlagCX communication of vllm-fl. Importing this loads neither torch nor FlagCX."""

from vllm_fl.version import __version__

__all__ = ["__version__"]
