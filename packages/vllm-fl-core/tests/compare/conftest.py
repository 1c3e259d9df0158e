from __future__ import annotations

import pytest
from compare_helpers import RIGHT, implementation, silu, wrong_above_four

from vllm_fl.dispatch import OpManager, set_global_policy
from vllm_fl.dispatch.default import adopt_default_manager

pytest.importorskip("vllm_fl_reference", reason="results are compared with the reference implementations")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def manager() -> OpManager:
    """The default manager, with a right and a wrong implementation of silu_and_mul; the right one is chosen."""
    made = OpManager(register_builtins=False)
    adopt_default_manager(made)
    made.registry.register_many([implementation("right", silu), implementation("wrong", wrong_above_four)])
    set_global_policy(RIGHT)
    return made
