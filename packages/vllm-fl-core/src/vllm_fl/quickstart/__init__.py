"""From nothing to three answers: a small real model, vLLM on it, and who served each operator.

:func:`prepare_model` gives the directory of SmolLM2-135M-Instruct, made once and then cached.
"""

from __future__ import annotations

from vllm_fl.quickstart.model import prepare_model

__all__ = ["prepare_model"]
