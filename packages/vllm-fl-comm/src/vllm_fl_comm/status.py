"""What ``vllm-fl info`` says about the communication on this host: what is active, and why not. Loads no torch."""

from __future__ import annotations

import os

from vllm_fl.errors import FLError
from vllm_fl.plugins import choose_communicator

from .errors import FlagCXLoadError
from .flagcx.library import PATH_ENV, Features, load
from .settings import CUSTOM_ENV, MULTICAST_ENV, CommSettings, comm_settings

__all__ = ["status"]

Line = tuple[str, str, str]


def status() -> list[Line]:
    """(subject, state, text) of the library and the custom all-reduce; state: ok, note or problem."""
    try:
        plugin = choose_communicator().plugin
    except FLError:
        return []  # the choice has a line of its own
    chosen = plugin is not None and plugin.name == "flagcx"
    if not chosen and PATH_ENV not in os.environ:
        return []
    try:
        library = load()
    except FlagCXLoadError as error:
        return [("FlagCX", "problem" if chosen else "note", str(error))]
    features = library.features
    form = "0.13 or later" if features.fills_unique_id else "0.12 or before"
    lines: list[Line] = [("FlagCX", "ok", f"{library.path}, interface of {form}")]
    if not features.abort:
        lines.append(("FlagCX", "note", "it cannot abort: a rank that waits for a lost peer is ended with its process"))
    try:
        lines.append(_custom(features, comm_settings()))
    except FLError as error:
        lines.append(("custom all-reduce", "problem", str(error)))
    return lines


def _custom(features: Features, settings: CommSettings) -> Line:
    subject = "custom all-reduce"
    if not features.custom_all_reduce:
        text = "not in this FlagCX, which was built without COMPILE_KERNEL=1"
        return subject, "problem" if settings.custom_all_reduce else "note", text
    if not settings.custom_all_reduce:
        how = "VLLM_FL_COMM_CUSTOM_ALL_REDUCE=1 asks for it"
        if not settings.multicast_allowed:
            how = f"and cannot be used while {MULTICAST_ENV}=0 keeps NVLink multicast off"
        return subject, "note", f"in this FlagCX, off ({settings.asked_by}); {how}"
    limit = settings.thresholds.custom
    text = f"asked for by {settings.asked_by}, up to {limit} bytes; the ranks agree on it when they start"
    return subject, "ok", f"{text} ({CUSTOM_ENV} is set by vllm-fl)"
