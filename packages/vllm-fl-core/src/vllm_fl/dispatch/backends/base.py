"""``Backend``, where backends written for vllm-plugin-FL import it from."""

from __future__ import annotations

from vllm_fl.dispatch.backend import Backend

__all__ = ["Backend"]
