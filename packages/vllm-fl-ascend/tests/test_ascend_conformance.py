"""The conformance kit over the simulated torch_npu."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.fl_distribution("vllm-fl-ascend")
def test_conformance(simulated_npu: object, fl_conformance: Callable[[], None]) -> None:
    fl_conformance()
