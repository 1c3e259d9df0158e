"""For every test of the repository."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Heed the signals that tests send to their children, which inherit it.

    A run in the background (``&``, nohup, some CI systems) starts with SIGINT or SIGHUP ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the machine that runs the tests; nothing read, found or selected stays, before and after."""
    from vllm_fl.config import ENVIRONMENT, reset_settings
    from vllm_fl.dispatch import clear_discovered_plugins, reset_default_manager, reset_global_policy
    from vllm_fl.plugins import reset_platform

    for name in list(os.environ):
        if name in ENVIRONMENT or name.startswith("VLLM_FL_"):
            monkeypatch.delenv(name)

    def reset() -> None:
        reset_default_manager()
        reset_platform()
        reset_settings()
        clear_discovered_plugins()
        reset_global_policy()

    reset()
    yield
    reset()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The messages that the loggers of vllm-fl emit at WARNING and above."""
    from vllm_fl.logging import get_logger

    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    get_logger().addHandler(handler)
    yield messages
    get_logger().removeHandler(handler)
