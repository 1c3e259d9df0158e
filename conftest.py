"""For every test of the repository."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Heed the signals that tests send to their children, which inherit it.

    A run in the background (``&``, nohup, some CI systems) starts with SIGINT or SIGHUP ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
