"""A plug-in of pytest that loads vLLM's general plug-ins, as every process of vLLM does before it makes an engine."""

from __future__ import annotations

from vllm.plugins import load_general_plugins

load_general_plugins()
