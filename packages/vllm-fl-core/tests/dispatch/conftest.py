from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from dispatch_helpers import manager_of

from vllm_fl.dispatch import OpImpl, OpManager, SelectionPolicy, discovery, set_global_policy
from vllm_fl.dispatch.default import adopt_default_manager
from vllm_fl.plugins import loading

hypothesis.settings.register_profile("steady", deadline=None)  # a busy machine is no reason to fail
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None) -> None:
    """No plug-in or backend of the machine that runs the tests; the default policy."""
    monkeypatch.setattr(loading, "entry_points", lambda **_: [])
    monkeypatch.setattr(discovery, "entry_points", lambda **_: [])
    set_global_policy(SelectionPolicy())


@pytest.fixture
def default() -> Callable[..., OpManager]:
    """``default(*impls)``: make a manager with these implementations the default one."""

    def make(*impls: OpImpl) -> OpManager:
        manager = manager_of(*impls)
        adopt_default_manager(manager)
        return manager

    return make
