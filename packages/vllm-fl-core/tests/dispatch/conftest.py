from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest
from dispatch_helpers import manager_of

from vllm_fl.config import ENVIRONMENT, reset_settings
from vllm_fl.dispatch import (
    OpImpl,
    OpManager,
    SelectionPolicy,
    clear_discovered_plugins,
    discovery,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
)
from vllm_fl.dispatch.default import adopt_default_manager
from vllm_fl.logging import get_logger
from vllm_fl.plugins import loading, reset_platform

hypothesis.settings.register_profile("steady", deadline=None)  # a busy machine is no reason to fail
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting, plug-in or backend of the machine that runs the tests; the default policy."""
    for name in list(os.environ):
        if name in ENVIRONMENT or name.startswith("VLLM_FL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(loading, "entry_points", lambda **_: [])
    monkeypatch.setattr(discovery, "entry_points", lambda **_: [])

    def reset() -> None:
        reset_default_manager()
        reset_platform()
        reset_settings()
        clear_discovered_plugins()

    reset()
    set_global_policy(SelectionPolicy())
    yield
    reset()
    reset_global_policy()


@pytest.fixture
def default() -> Callable[..., OpManager]:
    """``default(*impls)``: make a manager with these implementations the default one."""

    def make(*impls: OpImpl) -> OpManager:
        manager = manager_of(*impls)
        adopt_default_manager(manager)
        return manager

    return make


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The messages that the loggers of vllm-fl emit at WARNING and above."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = get_logger()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
