"""Every operator against float64, and the platform against what vLLM asks: a test for each check.

``pytest --fl-device cpu`` runs the operators on another device, ``--fl-op silu_and_mul`` one operator only.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.fl_distribution("vllm-fl-acme")
def test_conformance(fl_conformance: Callable[[], None]) -> None:
    fl_conformance()
