"""What is here and why: the Python API behind ``vllm-fl info``, ``explain`` and ``config``.

    from vllm_fl.diagnostics import collect_info, explain

    print(collect_info().ok)
    print(explain("rms_norm", dtype="bfloat16").chosen)

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from .arguments import ArgumentError
from .checks import Check
from .explain import CandidateView, Explanation, explain, explain_all
from .info import Info, PlatformView, PlugInView, collect_info
from .live import LiveProcess, ask_processes
from .names import known_names

__all__ = [
    "ArgumentError",
    "CandidateView",
    "Check",
    "Explanation",
    "Info",
    "LiveProcess",
    "PlatformView",
    "PlugInView",
    "ask_processes",
    "collect_info",
    "explain",
    "explain_all",
    "known_names",
]
