"""Verdicts about what is installed and configured, each with the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Literal

from vllm_fl.config import Settings
from vllm_fl.dispatch import Selection
from vllm_fl.dispatch.failures import describe
from vllm_fl.flagos import availability
from vllm_fl.plugins import installed_vllm, load_object, vllm_version_warning

from .versions import COMMUNICATOR_GROUP, requirement_of

State = Literal["ok", "note", "problem"]
_USER = ("file", "environment")


@dataclass(frozen=True)
class Check:
    """One verdict.

    Args:
        subject: what was judged.
        state: "problem" if something that the user configured cannot work or the installation is broken, "note" if
            something does not work that nobody asked for.
        text: what was found, and the remedy.
    """

    subject: str
    state: State
    text: str


def installation_checks() -> Iterator[Check]:
    """vLLM's version, NumPy between vLLM and FlagGems, Triton or FlagTree, FlagGems."""
    installed, warning = installed_vllm(), vllm_version_warning()
    if installed is None:
        yield Check("vLLM", "note", "not installed: operators can be called, models cannot be served; pip install vllm")
    else:
        yield Check("vLLM", "note" if warning else "ok", warning or f"{installed} is in the supported range")
    yield from _numpy()
    without_flaggems = availability.flaggems_problem() is not None
    for subject, text in availability.describe():
        if without_flaggems and subject.startswith("FlagGems,"):
            continue  # each would repeat that it is not installed
        bad = text.startswith(("no", "importing"))
        yield Check(subject, "note" if bad else "ok", text)


def _numpy() -> Iterator[Check]:
    wanted = requirement_of("vllm", "numpy")
    pinned = requirement_of(availability.FLAGGEMS, "numpy")
    try:
        have = version("numpy")
    except PackageNotFoundError:
        return
    if wanted is not None and not wanted.specifier.contains(have, prereleases=True):
        text = f"{have} is installed, vLLM needs {wanted}; pip install '{wanted}'"
        if pinned is not None:
            text += f". FlagGems pins {pinned}: install it without its dependencies, {availability.INSTALL_FLAGGEMS}"
        yield Check("NumPy", "problem", text)
    elif pinned is not None and not pinned.specifier.contains(have, prereleases=True):
        text = f"{have}, as vLLM needs it; FlagGems pins {pinned}, runs with this one, and was installed without it"
        yield Check("NumPy", "ok", text)
    else:
        yield Check("NumPy", "ok", have)


def configuration_checks(settings: Settings) -> Iterator[Check]:
    """What the user asked for and the installation does not have."""
    for warning in settings.warnings:
        yield Check("configuration", "note", warning)
    origin = settings.origin("use_flaggems")
    problem = availability.flaggems_problem()
    if settings.use_flaggems and origin.layer in _USER and problem is not None:
        yield Check("USE_FLAGGEMS", "problem", f"{origin} asks for FlagGems: {problem}")
    path = os.environ.get("FLAGCX_PATH")
    if path and not list(entry_points(group=COMMUNICATOR_GROUP)):
        text = f"environment variable FLAGCX_PATH is {path!r}, and no installed distribution brings a communicator"
        yield Check("FlagCX", "problem", f"{text}; pip install vllm-fl-comm, or unset the variable")


def selection_checks(settings: Settings, selections: dict[str, Selection]) -> Iterator[Check]:
    """Operators for which the user's wishes leave nothing, or something else than the first wish."""
    for name, selection in selections.items():
        ruled = [candidate for candidate in selection.candidates if not candidate.accepted and candidate.origin]
        if selection.chosen is None and ruled:
            why = f"{ruled[0].reason} ({ruled[0].origin})"
            yield Check(name, "problem", f"no implementation is left: {why}; 'vllm-fl explain {name}' shows all")
        if name in settings.op_backends and settings.origin("op_backends", name).layer in _USER:
            yield from _first_wish(name, settings, selection)


def _first_wish(name: str, settings: Settings, selection: Selection) -> Iterator[Check]:
    wish, chosen = settings.op_backends[name][0], selection.chosen
    if chosen is None or chosen.token == wish:
        return
    missed = next((c for c in selection.candidates if c.token == wish and not c.accepted), None)
    why = f"{missed.impl.impl_id} is {missed.reason}" if missed is not None else "no implementation matches it"
    text = f"the first wish {wish!r} is not served: {why}; {chosen.impl.impl_id} is used"
    yield Check(name, "note", f"{text} ({settings.origin('op_backends', name)})")


def communicator_checks() -> Iterator[Check]:
    """Each communicator plug-in: whether it loads, and the lines of the status function that it names.

    An entry point of ``vllm_fl.communicators`` may have an attribute ``status``, ``"package.module:function"``. The
    function is called without arguments and gives (subject, state, text) for each line, with the states of a
    :class:`Check`.
    """
    for point in sorted(entry_points(group=COMMUNICATOR_GROUP), key=lambda point: point.name):
        owner = point.dist.name if point.dist is not None else "an unknown distribution"
        subject = f"communicator {point.name}"
        try:
            lines = _status(point)
        except (Exception, SystemExit) as error:  # another distribution's code may fail in any way
            yield Check(subject, "problem", f"{describe(error)}; reinstall, update or remove {owner}")
        else:
            yield from (Check(subject, "ok", f"of {owner}"), *lines)


def _status(point: EntryPoint) -> list[Check]:
    status = getattr(point.load(), "status", None)
    return [Check(*line) for line in load_object(status)()] if isinstance(status, str) else []
