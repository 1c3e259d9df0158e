"""The installed communicators, and which of them the ranks of this run communicate by."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from vllm_fl.errors import PlatformError, did_you_mean

from .descriptor import check_name_and_requirements, load_object
from .loading import Loaded, load_group

COMMUNICATOR_GROUP = "vllm_fl.communicators"
NATIVE = "native"  #: the value of ``comm`` that stands for the platform's own communicator

#: Variables that select a communicator -> the distribution that brings it, to be named where that is not installed.
SELECTING_VARIABLES = {"FLAGCX_PATH": "vllm-fl-comm"}

_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class CommunicatorPlugin:
    """One communicator, as an entry point of the group ``vllm_fl.communicators`` names it.

    The module that holds it must import neither torch nor vllm.

    Args:
        name: the entry point's name, and a value of the key ``comm``.
        communicator: ``"pkg.mod:function"``, called with the torch device type: the path of the class that vLLM makes
            for each group of ranks. It raises if the library behind it cannot be used, which stops the start.
        status: ``"pkg.mod:function"``, called without arguments: a list of (subject, state, text) for ``vllm-fl info``,
            state being ok, note or problem. It imports neither torch nor vllm.
        variables: environment variables that select this communicator by being set.
        dist_backend: ``"pkg.mod:function"``, called with the torch device type: the name of the backend of
            torch.distributed that vLLM makes its device groups by, or None for the platform's own.
        kv_connectors: (name, ``"pkg.mod:Class"``) of connectors for ``--kv-transfer-config``, for the KV cache that one
            instance of vLLM hands to another. Registered wherever the distribution is installed.
        requires: PEP 508 requirements, judged from metadata before anything is imported.

    Raises:
        ValueError: a field has the wrong form.
    """

    name: str
    communicator: str
    status: str | None = None
    variables: tuple[str, ...] = ()
    dist_backend: str | None = None
    kv_connectors: tuple[tuple[str, str], ...] = ()
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name == NATIVE:
            raise ValueError(f"CommunicatorPlugin: the name {NATIVE!r} stands for the platform's own communicator")
        functions = {name: getattr(self, name) for name in ("communicator", "status", "dist_backend")}
        classes = {f"KV connector {name}": path for name, path in self.kv_connectors}
        for attribute, value in {**functions, **classes}.items():
            if value is not None and not _OBJECT.fullmatch(value):
                form = "package.module:function" if attribute in functions else "package.module:Class"
                raise ValueError(f"CommunicatorPlugin {self.name!r}: {attribute} {value!r} is not of the form {form!r}")
        check_name_and_requirements("CommunicatorPlugin", self.name, self.requires)


InstalledCommunicator = Loaded[CommunicatorPlugin]


@dataclass(frozen=True)
class CommunicatorChoice:
    """The communicator of this run; `plugin` is None for the platform's own, `reason` says why."""

    plugin: CommunicatorPlugin | None
    reason: str


def installed_communicators() -> tuple[InstalledCommunicator, ...]:
    """Every entry point of the group, by name; read once a process."""
    return load_group(COMMUNICATOR_GROUP, CommunicatorPlugin, "communicator")


def choose_communicator() -> CommunicatorChoice:
    """The communicator that the key ``comm`` names, else the one whose variable is set, else the platform's own.

    Raises:
        PlatformError: the named one is not installed or cannot be used, or the variables select none or several.
        ConfigError: the user's configuration is wrong.
    """
    from vllm_fl.config import user_value

    name, origin = user_value("comm")
    installed = installed_communicators()
    if name == NATIVE:
        return CommunicatorChoice(None, f"asked for by {origin}")
    if name is not None:
        return CommunicatorChoice(_usable(name, str(origin), installed), f"asked for by {origin}")
    selected: dict[str, str] = {}
    for item in installed:
        for variable in item.plugin.variables if item.plugin is not None else ():
            if variable in os.environ:
                selected.setdefault(item.entry_point, f"environment variable {variable}")
    if len(selected) > 1:
        listing = " and ".join(f"{item!r} by {place}" for item, place in selected.items())
        raise PlatformError(f"several communicators are selected: {listing}; choose one with VLLM_FL_COMM")
    for item_name, place in selected.items():
        return CommunicatorChoice(_usable(item_name, place, installed), f"selected by {place}")
    _refuse_unserved_variables(installed)
    return CommunicatorChoice(None, "no communicator is asked for")


def communicator_class(device_type: str) -> str | None:
    """Path of the class of the chosen communicator for devices of this type; None for the platform's own.

    Raises:
        PlatformError: see :func:`choose_communicator`; and what the communicator raises if it cannot be used.
    """
    choice = choose_communicator()
    return None if choice.plugin is None else str(load_object(choice.plugin.communicator)(device_type))


def _usable(name: str, place: str, installed: tuple[InstalledCommunicator, ...]) -> CommunicatorPlugin:
    found = next((item for item in installed if item.entry_point == name), None)
    if found is None:
        names = [NATIVE, *(item.entry_point for item in installed)]
        hint = did_you_mean(name, names)
        raise PlatformError(f"{place}: communicator {name!r} is not installed (installed: {', '.join(names)}){hint}")
    if found.plugin is None or found.error is not None:
        raise PlatformError(f"{place}: communicator {name!r} of {found.distribution} cannot be used: {found.error}")
    return found.plugin


def _refuse_unserved_variables(installed: tuple[InstalledCommunicator, ...]) -> None:
    for variable, distribution in SELECTING_VARIABLES.items():
        if variable in os.environ:
            broken = next((item.error for item in installed if item.distribution == distribution), None)
            remedy = f"; {broken}" if broken else f": pip install {distribution}"
            raise PlatformError(
                f"environment variable {variable} asks for a communicator that {distribution} brings, and which is not"
                f" there{remedy}, or unset the variable"
            )
