"""Verdicts about what is installed and configured, each with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from vllm_fl.config import Settings
from vllm_fl.dispatch import Selection
from vllm_fl.dispatch.failures import describe
from vllm_fl.errors import ConfigError, PlatformError
from vllm_fl.flagos import availability
from vllm_fl.plugins import (
    choose_communicator,
    installed_communicators,
    installed_vllm,
    load_object,
    vllm_version_warning,
)

from .versions import requirement_of

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
    """The choice of a communicator, whether each of them loads, and what its status function says."""
    try:
        choice = choose_communicator()
    except PlatformError as error:
        yield Check("communicator", "problem", str(error))
    except ConfigError:
        pass  # the configuration has a check of its own
    else:
        name = "the platform's own" if choice.plugin is None else choice.plugin.name
        yield Check("communicator", "ok", f"{name}: {choice.reason}")
    for item in installed_communicators():
        subject = f"communicator {item.entry_point}"
        if item.plugin is None or item.error is not None:
            yield Check(subject, "problem", item.error or "it could not be loaded")
            continue
        try:
            lines = load_object(item.plugin.status)() if item.plugin.status is not None else []
        except (Exception, SystemExit) as error:  # another distribution's code may fail in any way
            yield Check(subject, "problem", f"{describe(error)}; reinstall, update or remove {item.distribution}")
        else:
            yield from (Check(subject, "ok", f"of {item.distribution}"), *(Check(*line) for line in lines))
