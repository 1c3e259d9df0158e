"""Checks of what a backend declares: metadata, entry points, probe, platform file, registration, platform class."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import as_file

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_fl.config import KnownNames, check_file, load_settings
from vllm_fl.dispatch import PLUGIN_GROUP, BackendImplKind
from vllm_fl.errors import ConfigError
from vllm_fl.plugins import BACKEND_GROUP, platform_file

from .conformance import Options
from .imports import unimportable
from .results import PLATFORM_CHECKS, CheckResult, Status, Subject, Violation
from .subjects import Bundle

CORE = "vllm-fl-core"


class Skip(Exception):
    """A check cannot be made; the message says why."""


def check_backend(bundle: Bundle, options: Options) -> Subject:
    """Run the checks of a backend's declarations."""
    subject = Subject(bundle.name, "", bundle.distribution, bundle.plugin.kind.value if bundle.plugin else "")
    begin = time.perf_counter()
    checks: dict[str, Callable[[Bundle], Iterator[str]]] = {
        "metadata": _metadata,
        "import": _import,
        "probe": _probe,
        "yaml": _yaml,
        "register": _register,
        "platform": _platform,
    }
    for check in PLATFORM_CHECKS:
        if options.wants(check):
            subject.checks[check] = _run(check, checks[check], bundle)
    subject.seconds = time.perf_counter() - begin
    return subject


def _run(check: str, function: Callable[[Bundle], Iterator[str]], bundle: Bundle) -> CheckResult:
    try:
        violations = [Violation(check, text) for text in function(bundle)]
    except Skip as reason:
        return CheckResult(check, Status.SKIPPED, notes=[str(reason)])
    return CheckResult(check, Status.FAILED if violations else Status.PASSED, 1, violations)


def _metadata(bundle: Bundle) -> Iterator[str]:
    try:
        found = distribution(bundle.distribution)
    except PackageNotFoundError:
        yield f"the metadata of {bundle.distribution} is not installed; install its wheel"
        return
    if canonicalize_name(bundle.distribution) != CORE:
        core = [r for r in map(Requirement, found.requires or []) if canonicalize_name(r.name) == CORE]
        if not core:
            yield f"it does not require {CORE}; add it to the dependencies, with bounds"
        elif not core[0].specifier:
            yield f"it requires {CORE} of any version; give bounds, such as '{CORE}>=0.1,<0.2'"
    for field in ("Requires-Python", "Summary"):
        if not found.metadata.get_all(field):
            yield f"the metadata has no {field}"
    if not any(found.metadata.get_all(field) for field in ("License-Expression", "License")):
        yield "the metadata has no License-Expression"


_SECONDS = 120
_CHILD = """
import builtins, importlib.abc, json, sys
from importlib.metadata import entry_points
group, name, blocked = sys.argv[1:4]

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in blocked.split(","):
            raise ModuleNotFoundError(f"{fullname} is taken to be missing", name=fullname)

sys.meta_path.insert(0, Blocked())
(point,) = entry_points(group=group, name=name)
before = set(sys.modules)
point.load()
print(json.dumps(sorted({module.partition(".")[0] for module in set(sys.modules) - before})))
"""


def _import(bundle: Bundle) -> Iterator[str]:
    if bundle.plugin is None and not bundle.error:
        raise Skip("an entry point of vllm_fl.plugin may import what it needs")
    group = BACKEND_GROUP if bundle.plugin is not None else PLUGIN_GROUP
    command = [sys.executable, "-c", _CHILD, group, bundle.name, "torch,triton,vllm"]
    done = _child(command)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        yield f"loading the entry point fails without torch, triton and vllm: {lines[-1]}; import late what needs them"
        return
    own = {bundle.package, "vllm_fl", "yaml", "pydantic", "pydantic_core", "packaging", "typing_extensions"}
    foreign = {name for name in json.loads(done.stdout.splitlines()[-1]) if not _is_standard(name)} - own
    if foreign:
        yield f"loading the entry point imports {', '.join(sorted(foreign))}; import it where it is used"


def _child(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A child that ends in time; one that does not is as one that fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_SECONDS} s")


def _is_standard(name: str) -> bool:
    return name in sys.stdlib_module_names or name.startswith("_")


def _probe(bundle: Bundle) -> Iterator[str]:
    plugin = bundle.plugin
    if plugin is None or plugin.probe is None:
        raise Skip("it declares no probe")
    code = (
        "import json, sys; from vllm_fl.plugins import load_object; from vllm_fl.dispatch.types import Availability;"
        "answer = load_object(sys.argv[1])(); print(json.dumps(['vllm' in sys.modules, isinstance(answer, (bool,"
        " Availability)), repr(answer)]))"
    )
    command = [sys.executable, "-c", code, plugin.probe]
    done = _child(command)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        yield f"{plugin.probe} raised {lines[-1]}"
        return
    imports_vllm, is_answer, shown = json.loads(done.stdout.splitlines()[-1])
    if imports_vllm:
        yield f"{plugin.probe} imports vllm, which is asking for its platform while it is imported itself"
    if not is_answer:
        yield f"{plugin.probe} returned {shown}, expected a bool or an Availability"


def _yaml(bundle: Bundle) -> Iterator[str]:
    plugin = bundle.plugin
    if plugin is None or plugin.config is None:
        raise Skip("it declares no platform file")
    try:
        file = platform_file(plugin)
        load_settings({}, file)
    except ConfigError as error:
        yield str(error)
        return
    except Exception as error:  # the package's import may fail in any way
        yield f"{plugin.config}: {type(error).__name__}: {error}"
        return
    from vllm_fl.dispatch import get_default_manager

    manager = get_default_manager()
    manager.ensure_initialized()
    snapshot = manager.registry.snapshot().impls_by_op
    impls = [impl for found in snapshot.values() for impl in found] + bundle.implementations
    with as_file(file) as path:  # type: ignore[arg-type]
        names = KnownNames(
            operators={*manager.registry.known_operators(), *bundle.registry.known_operators()},
            vendors={impl.vendor for impl in impls if impl.vendor} | ({plugin.vendor} if plugin.vendor else set()),
            impl_ids={impl.impl_id for impl in impls},
        )
        yield from map(str, check_file(path, names))


def _register(bundle: Bundle) -> Iterator[str]:
    if bundle.error:
        yield bundle.error
        return
    plugin = bundle.plugin
    if plugin is not None and plugin.register is None:
        raise Skip("it declares no register function")
    if not bundle.implementations:
        yield "it registers no implementation"
    for impl in bundle.implementations:
        label = f"{impl.op_name}: implementation {impl.impl_id!r}"
        if plugin is not None and impl.kind is not plugin.kind:
            yield f"{label} is of kind {impl.kind}, the backend of kind {plugin.kind}"
        if plugin is not None and plugin.kind is BackendImplKind.VENDOR and impl.vendor != plugin.vendor:
            yield f"{label} names the vendor {impl.vendor!r}, the backend {plugin.vendor!r}"


def _platform(bundle: Bundle) -> Iterator[str]:
    if bundle.plugin is None or bundle.plugin.platform is None:
        raise Skip("it brings no platform")
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    from .platform_class import problems_of

    here = bundle.is_here()
    if not here and (problem := unimportable(bundle.plugin.platform)):
        raise Skip(f"{problem}; the probe says: {here.reason}")
    yield from problems_of(bundle.plugin, bool(here))
