"""Loggers of vllm-fl: one handler on standard error, one level variable."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

from vllm_fl.errors import ConfigError, did_you_mean

ROOT = "vllm_fl"
LEVEL_ENV = "VLLM_FL_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler  # not subscriptable before Python 3.11


class _StderrHandler(_Handler):
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection after import works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


def _parse_level(level: str | int, where: str) -> int:
    if isinstance(level, int):
        return level
    name = level.strip().upper()
    if name not in _LEVELS:
        raise ConfigError(f"{where}: {level!r} is not a log level ({', '.join(_LEVELS)}){did_you_mean(name, _LEVELS)}")
    return int(getattr(logging, name))


_handler = _StderrHandler()
_handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", datefmt="%H:%M:%S"))


def _configure(root: logging.Logger) -> None:
    if _handler in root.handlers:
        return
    root.addHandler(_handler)  # once, even if two threads come here
    root.propagate = False
    try:
        root.setLevel(_parse_level(os.environ.get(LEVEL_ENV, "INFO"), f"environment variable {LEVEL_ENV}"))
    except ConfigError as error:  # a logger must not fail; the configuration raises the same mistake when it is read
        root.setLevel(logging.INFO)
        root.warning("%s; INFO is used", error)


def get_logger(name: str = ROOT) -> logging.Logger:
    """The logger of a module of vllm-fl, or of a distribution that extends it.

    Names outside ``vllm_fl`` and ``vllm_fl.*`` become children of ``vllm_fl``, so that one level and one handler
    serve all of them. A wrong ``VLLM_FL_LOG_LEVEL`` is reported and INFO used.
    """
    _configure(logging.getLogger(ROOT))
    inside = name == ROOT or name.startswith(f"{ROOT}.")
    return logging.getLogger(name if inside else f"{ROOT}.{name}")


def set_log_level(level: str | int, name: str | None = None) -> None:
    """Set the level of everything (`name` None) or of one logger.

    Raises:
        ConfigError: `level` is not a level.
    """
    get_logger(name or ROOT).setLevel(_parse_level(level, "set_log_level"))
