"""Judges requirements, and vLLM's version, from the metadata of what is installed. Imports nothing that it judges."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vllm_fl.version import __version__

#: First and last supported minor version of vLLM, both included.
SUPPORTED_VLLM = ((0, 26), (0, 33))

#: What breaks on which vLLM outside the range, as far as models of the compatibility matrix have been run there (0.20.2
#: to 0.25.1, on the CPU). The warning at start says it.
KNOWN_TO_BREAK = (
    ("<0.22", "no engine starts (layers that vllm-fl replaces are not there)"),
    (">=0.22,<0.25", "models with a recurrent state, such as Qwen3-Next, where Triton is missing"),
    (">=0.24,<0.25", "gpt-oss (its expert weights are not found)"),
)


def requirement_problem(text: str) -> str | None:
    """Why the PEP 508 requirement `text` is not met here, with the remedy; None if it is met or does not apply."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    wanted = f"{requirement.name}{requirement.specifier}"
    remedy = f"pip install {wanted!r}"
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"it needs {wanted}, and {requirement.name} is not installed; {remedy}"
    try:
        met = requirement.specifier.contains(installed, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else f"it needs {wanted}, and {requirement.name} {installed} is installed; {remedy}"


def installed_vllm() -> str | None:
    """The version of the installed vLLM, from its metadata; None if it is not installed."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def vllm_version_warning() -> str | None:
    """What to tell the user about a vLLM outside :data:`SUPPORTED_VLLM`; None if it is inside, or not installed."""
    from packaging.version import InvalidVersion, Version

    installed = installed_vllm()
    if installed is None:
        return None
    (low, high), tail = SUPPORTED_VLLM, ""
    try:
        release = Version(installed).release
    except InvalidVersion:
        tail = " (its version cannot be read)"
    else:
        if low <= (*release, 0)[:2] <= high:
            return None
    above = (high[0], high[1] + 1)
    return (
        f"vLLM {installed} is outside the range that vllm-fl-core {__version__} supports{tail}: "
        f"{_dotted(low)} to {_dotted(high)}. Known to break: {known_to_break(installed) or 'nothing so far'}. "
        f"It continues, but may fail or give wrong results. "
        f"Install a supported version: pip install 'vllm>={_dotted(low)},<{_dotted(above)}'"
    )


def known_to_break(installed: str) -> str:
    """The entries of :data:`KNOWN_TO_BREAK` for this version of vLLM; empty if there is none, or it cannot be read."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return "; ".join(what for where, what in KNOWN_TO_BREAK if SpecifierSet(where).contains(installed, True))
    except InvalidVersion:
        return ""


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
