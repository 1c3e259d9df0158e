"""Versions of what matters here, from the metadata of what is installed."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import InvalidRequirement, Requirement

from vllm_fl.dispatch.discovery import PLUGIN_GROUP
from vllm_fl.plugins import BACKEND_GROUP, COMMUNICATOR_GROUP

_ALWAYS = ("vllm-fl-core", "vllm", "torch", "numpy", "transformers", "triton", "flagtree", "flag-gems")


def versions() -> dict[str, str]:
    """Distribution to version: vllm-fl's own, those that extend it, and what they stand on; "Python" is the first."""
    names = [*_ALWAYS[:1], *sorted(_extensions()), *_ALWAYS[1:]]
    found = {"Python": platform.python_version()}
    for name in dict.fromkeys(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def requirement_of(distribution: str, name: str) -> Requirement | None:
    """What an installed distribution requires of another; None if nothing, or if it is not installed."""
    try:
        declared = requires(distribution) or []
    except PackageNotFoundError:
        return None
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name.lower() == name and applies:
            return requirement
    return None


def _extensions() -> Iterator[str]:
    for group in (BACKEND_GROUP, PLUGIN_GROUP, COMMUNICATOR_GROUP):
        for point in entry_points(group=group):
            if point.dist is not None:
                yield point.dist.name
