"""One unmodified vLLM on any chip: operator dispatch, configuration and vLLM integration.

Importing this package imports neither torch nor vLLM. Start at :mod:`vllm_fl.dispatch`.
"""

from __future__ import annotations

from vllm_fl.version import __version__

__all__ = ["__version__"]
