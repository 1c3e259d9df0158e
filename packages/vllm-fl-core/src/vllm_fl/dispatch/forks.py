"""What a forked child does first: objects that own locks get new ones.

A lock that another thread of the parent held at the fork stays locked in the child for ever. Objects are held weakly,
so registering one does not keep it alive.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def after_fork_in_child(self) -> None:
        """Replace locks and forget what another thread may have left half-done."""


_objects: WeakSet[Forkable] = WeakSet()


def reset_in_child(obj: Forkable) -> None:
    """Call ``obj.after_fork_in_child()`` in every child forked while `obj` lives."""
    _objects.add(obj)


def _in_child() -> None:
    for obj in list(_objects):
        obj.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
