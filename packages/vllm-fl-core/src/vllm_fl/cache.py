"""Where this project keeps what it downloaded or built for a user, and how processes take turns there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/vllm-fl``, or ``~/.cache/vllm-fl``. A relative XDG_CACHE_HOME does not count."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "vllm-fl"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time: holds a lock on the file `path`, which is created, until the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
