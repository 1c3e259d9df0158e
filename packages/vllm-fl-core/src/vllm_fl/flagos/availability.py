"""What this process can run, each answer with its reason: Triton and its driver, FlagTree, FlagGems.

FlagGems is judged by the metadata of what is installed. Importing it initialises the device, which a process that forks
its workers must not do.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from vllm_fl.dispatch.types import AVAILABLE, Availability

#: Oldest release that the kernels are compiled and tested with.
OLDEST_TRITON = (3, 6)
#: Newest release that FlagGems' kernels were tried with, operator by operator.
NEWEST_TRITON_FOR_FLAGGEMS = (3, 9)
#: From this release on FlagGems' generated elementwise kernels do not compile.
NO_POINTWISE_TRITON = (3, 8)

FLAGGEMS = "flag-gems"
FLAGTREE = "flagtree"
INSTALL_FLAGGEMS = 'pip install --no-deps flag-gems==5.0.2 "sqlalchemy>=2.0.48"'
_SQLALCHEMY = "sqlalchemy>=2.0.48"


@dataclass(frozen=True)
class TritonInfo:
    """The Triton of this environment.

    Args:
        version: version of the language, as the module has it.
        distribution: what installed it, and its version, such as ``"flagtree 0.6.1"``.
        is_flagtree: whether it is FlagTree, a fork of Triton for more chips under the same module name.
        drivers: the backends whose driver finds a device.
    """

    version: str
    distribution: str
    is_flagtree: bool
    drivers: tuple[str, ...]

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor version."""
        numbers = [part for part in self.version.split("+")[0].split(".")[:2] if part.isdigit()]
        return tuple(int(part) for part in numbers)

    def __str__(self) -> str:
        language = f" (Triton {self.version})" if self.is_flagtree else ""
        return f"{self.distribution}{language}, {'driver ' + ', '.join(self.drivers) if self.drivers else 'no driver'}"


def triton_info() -> TritonInfo | None:
    """The Triton of this environment; None if there is none.

    Raises:
        Exception: whatever importing it raises.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    import triton
    from triton.backends import backends

    flagtree = _version(FLAGTREE)
    # FlagTree's language extensions tell it by the module, where its metadata is missing.
    is_flagtree = flagtree is not None or importlib.util.find_spec("triton.experimental.tle") is not None
    name = FLAGTREE if is_flagtree else "triton"
    distribution = f"{name} {flagtree or triton.__version__}"
    drivers = tuple(sorted(key for key, backend in backends.items() if backend.driver.is_active()))
    return TritonInfo(triton.__version__, distribution, is_flagtree, drivers)


def is_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET`` asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def triton_kernels() -> Availability:
    """Whether this process can launch Triton kernels on the platform's device."""
    try:
        info = triton_info()
    except Exception as error:  # a broken installation may fail in any way
        return Availability(False, f"importing Triton raised {type(error).__name__}: {error}; reinstall triton")
    if info is None:
        return Availability(False, "Triton is not installed; pip install triton")
    if info.release < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return Availability(False, f"{info.distribution} is older than Triton {oldest}; pip install 'triton>={oldest}'")
    if is_interpreted():
        return Availability(True, "Triton's interpreter (TRITON_INTERPRET), without bfloat16")
    if not info.drivers:
        return Availability(False, f"no active Triton driver ({info.distribution} finds no device)")
    return _same_device(info)


def triton_attention() -> Availability:
    """Whether vLLM's Triton attention, which ours extends, can be used: it knows no interpreter."""
    kernels = triton_kernels()
    if kernels and is_interpreted():
        return Availability(False, "vLLM's Triton attention does not run in Triton's interpreter (TRITON_INTERPRET)")
    return kernels


def _same_device(info: TritonInfo) -> Availability:
    from vllm_fl.plugins import resolve_platform

    plugin = resolve_platform().plugin
    if plugin is None or plugin.device_type != "cpu" or "cpu" in info.drivers:
        return AVAILABLE
    drivers = ", ".join(info.drivers)
    return Availability(False, f"platform {plugin.name!r} computes on the CPU, the active Triton driver is {drivers}")


def flaggems_raw() -> Availability:
    """Whether FlagGems' hand-written kernels can be used: those that need nothing that newer Triton has dropped."""
    return _flaggems(None, "")


def flaggems_pointwise() -> Availability:
    """Whether FlagGems' operators with generated elementwise kernels can be used."""
    return _flaggems(NO_POINTWISE_TRITON, "its generated elementwise kernels need Triton below 3.8")


def flaggems_aten() -> Availability:
    """Whether FlagGems' replacements of ATen functions can be used; most are generated elementwise kernels."""
    return _flaggems(NO_POINTWISE_TRITON, "most of its ATen functions need Triton below 3.8")


def _flaggems(broken_from: tuple[int, int] | None, why: str) -> Availability:
    problem = flaggems_problem()
    if problem is not None:
        return Availability(False, problem)
    kernels = triton_kernels()
    if not kernels:
        return kernels
    if is_interpreted():
        return Availability(False, "FlagGems does not run in Triton's interpreter (TRITON_INTERPRET)")
    info = triton_info()
    assert info is not None
    have = f"{info.distribution} is installed"
    if info.release > NEWEST_TRITON_FOR_FLAGGEMS:
        newest = ".".join(map(str, NEWEST_TRITON_FOR_FLAGGEMS))
        return Availability(False, f"FlagGems is not tried with Triton above {newest}, {have}")
    if broken_from is not None and info.release >= broken_from:
        return Availability(False, f"FlagGems: {why}, {have}")
    return AVAILABLE


def flaggems_version() -> str | None:
    """The release that is installed; None if there is none."""
    return _version(FLAGGEMS)


def flaggems_problem() -> str | None:
    """Why FlagGems cannot be imported as far as metadata tells, with the remedy; None if nothing is missing."""
    from vllm_fl.plugins.requirements import requirement_problem

    if flaggems_version() is None:
        return f"FlagGems is not installed; {INSTALL_FLAGGEMS}"
    problem = requirement_problem(_SQLALCHEMY)
    return None if problem is None else f"FlagGems {flaggems_version()}: {problem}"


def describe() -> list[tuple[str, str]]:
    """(what, state) of everything above, for ``vllm-fl info``."""
    try:
        triton = str(triton_info() or "not installed")
    except Exception as error:  # shown, like any other state
        triton = f"importing it raised {type(error).__name__}: {error}"
    checks: list[tuple[str, Callable[[], Availability]]] = [
        ("Triton kernels", triton_kernels),
        ("FlagGems, hand-written kernels", flaggems_raw),
        ("FlagGems, elementwise kernels", flaggems_pointwise),
        ("FlagGems, ATen functions", flaggems_aten),
    ]
    rows = [("Triton", triton), ("FlagGems", flaggems_version() or f"not installed; {INSTALL_FLAGGEMS}")]
    for name, check in checks:
        answer = check()
        rows.append((name, f"{'yes' if answer else 'no'}{': ' + answer.reason if answer.reason else ''}"))
    return rows


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
