"""What a distribution declares about its backend: plain data and strings, so that reading it loads nothing heavy."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_fl.errors import did_you_mean

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import BackendImplKind

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_OBJECT = re.compile(f"{_DOTTED}:{_DOTTED}")
_CLASS = re.compile(rf"{_DOTTED}\.[A-Za-z_]\w*")
_DATA = re.compile(rf"{_DOTTED}:[\w.\-/]+")


@dataclass(frozen=True)
class BackendPlugin:
    """One backend, as an entry point of the group ``vllm_fl.backends`` names it.

    The module that holds it must import neither torch nor a vendor's SDK, and nothing of ``vllm``.

    Args:
        name: the entry point's name, and what ``VLLM_FL_PLATFORM`` takes.
        kind: the kind of its implementations.
        vendor: required for kind VENDOR.
        device_type: torch device type, such as ``"npu"``.
        probe: ``"pkg.mod:function"``, called without arguments: whether this machine has the device, as a bool or an
            :class:`~vllm_fl.dispatch.Availability`. It runs while vLLM is being imported, in every process: cheap,
            no ``vllm.platforms``, no initialisation of a device.
        register: ``"pkg.mod:function"``, called with the operator registry.
        platform: ``"pkg.mod.Class"``, the vLLM ``Platform``; None for a backend that only brings operators.
        config: ``"pkg:file.yaml"``, package data: the platform layer of the configuration.
        requires: PEP 508 requirements, judged from the metadata of what is installed before anything is imported.
        fallback: the platform answers only if no other fits and vLLM has none of its own, or if it is asked for.

    Raises:
        ValueError: a field has the wrong form.
    """

    name: str
    kind: BackendImplKind
    vendor: str | None = None
    device_type: str | None = None
    probe: str | None = None
    register: str | None = None
    platform: str | None = None
    config: str | None = None
    requires: tuple[str, ...] = ()
    fallback: bool = False

    def __post_init__(self) -> None:
        from vllm_fl.dispatch.types import BackendImplKind

        kinds = [kind.value for kind in BackendImplKind]
        if self.kind not in kinds:
            hint = did_you_mean(str(self.kind), kinds)
            raise ValueError(f"BackendPlugin {self.name!r}: {self.kind!r} is not one of {', '.join(kinds)}{hint}")
        object.__setattr__(self, "kind", BackendImplKind(self.kind))
        object.__setattr__(self, "requires", tuple(self.requires))
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise ValueError(f"BackendPlugin {self.name!r} is of kind vendor but names no vendor")
        forms = (
            ("probe", _OBJECT, "package.module:function"),
            ("register", _OBJECT, "package.module:function"),
            ("platform", _CLASS, "package.module.Class"),
            ("config", _DATA, "package:file.yaml"),
        )
        for attribute, pattern, form in forms:
            value = getattr(self, attribute)
            if value is not None and not pattern.fullmatch(value):
                raise ValueError(f"BackendPlugin {self.name!r}: {attribute} {value!r} is not of the form {form!r}")
        check_name_and_requirements(type(self).__name__, self.name, self.requires)


def check_name_and_requirements(what: str, name: str, requires: tuple[str, ...]) -> None:
    """Raise ValueError if `name` is none, or one of `requires` is no PEP 508 requirement."""
    from packaging.requirements import InvalidRequirement, Requirement

    if not _NAME.fullmatch(name):
        raise ValueError(f"{what}: {name!r} is not a name (letters, digits, '_', '-', '.')")
    for text in requires:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise ValueError(f"{what} {name!r}: {text!r} is not a requirement: {error}") from None


def load_object(target: str) -> Any:
    """Import what ``"package.module:object"`` names.

    Raises:
        ImportError, AttributeError: there is no such module or object; and whatever the import raises.
    """
    module, _, path = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value
