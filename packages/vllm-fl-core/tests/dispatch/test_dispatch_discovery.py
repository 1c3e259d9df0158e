"""Backends, entry points and modules: what registers, and what is left out with a reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dispatch_helpers import reference, silu, vendor

from vllm_fl.config import reset_settings
from vllm_fl.dispatch import (
    BackendImplKind,
    OpManager,
    OpRegistry,
    call_op,
    clear_discovered_plugins,
    discover_plugins,
    discovery,
    get_default_manager,
    get_discovered_plugins,
    plugin_reports,
    reset_global_policy,
)
from vllm_fl.dispatch.discovery import discover_from_env_modules
from vllm_fl.errors import ConfigError
from vllm_fl.plugins import BackendPlugin, InstalledBackend

Register = Callable[[OpRegistry], None]


class Point:
    """An entry point of a distribution that is not installed."""

    def __init__(self, name: str, loaded: Register | Exception, distribution: str | None = None) -> None:
        self.name = self.value = name
        self._loaded = loaded
        self.dist = SimpleNamespace(name=distribution or f"vllm-fl-{name}")

    def load(self) -> Register:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    found: list[Point] = []
    monkeypatch.setattr(discovery, "entry_points", lambda group: found if group == "vllm_fl.plugin" else [])
    return found


def good(name: str) -> Register:
    def register_builtins(registry: OpRegistry) -> None:
        registry.register_many([vendor(name, "silu_and_mul", silu(name))])

    return register_builtins


def test_entry_points_register(points: list[Point]) -> None:
    points += [Point("b", good("b")), Point("a", good("a"))]
    registry = OpRegistry()
    assert discover_plugins(registry) == 2
    assert [impl.impl_id for impl in registry.get_implementations("silu_and_mul")] == ["vendor.a", "vendor.b"]
    assert get_discovered_plugins() == [("a", "entry_point", True), ("b", "entry_point", True)]
    assert discover_plugins(registry) == 0, "nothing is registered twice"
    assert discover_plugins(OpRegistry()) == 2
    clear_discovered_plugins()
    assert get_discovered_plugins() == []


def wrong_signature(registry: OpRegistry) -> None:
    registry.register_impl(vendor("bad", "moe_sum", lambda input, output: None))
    registry.register_impl(vendor("bad", "rms_norm", lambda x, weight, eps: x))


def same_id_twice(registry: OpRegistry) -> None:
    registry.register_impl(vendor("bad", "moe_sum", lambda input, output: None))
    registry.register_impl(vendor("bad", "silu_and_mul", silu(0)))
    registry.register_impl(vendor("bad", "silu_and_mul", silu(1)))


def raises(registry: OpRegistry) -> None:
    registry.register_impl(vendor("bad", "moe_sum", lambda input, output: None))
    raise OSError("libbad.so: no such file")


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        (
            ModuleNotFoundError("No module named 'torch_bad'"),
            "ModuleNotFoundError: No module named 'torch_bad'; install what it imports, or remove it"
            " (pip uninstall vllm-fl-bad)",
        ),
        (
            raises,
            "OSError: libbad.so: no such file; update it, report it to its maintainers, or remove it"
            " (pip uninstall vllm-fl-bad)",
        ),
        (
            wrong_signature,
            "RegistrationError: rms_norm(x, residual, weight, epsilon): implementation 'vendor.bad' does not fit:"
            " parameter 2 is named 'weight', the operator's is 'residual'; update it, report it to its maintainers, or"
            " remove it (pip uninstall vllm-fl-bad)",
        ),
        (
            same_id_twice,
            "RegistrationError: silu_and_mul: implementation 'vendor.bad' is registered already by entry_point 'bad' of"
            " vllm-fl-bad; give the second one another impl_id; update it, report it to its maintainers, or remove it"
            " (pip uninstall vllm-fl-bad)",
        ),
    ],
    ids=["import", "register", "signature", "twice"],
)
def test_one_that_fails_disturbs_nobody(
    loaded: Register | Exception, problem: str, points: list[Point], warnings: list[str]
) -> None:
    points += [Point("bad", loaded), Point("good", good("good"))]
    manager = OpManager()
    assert manager.call("silu_and_mul", 1) == "good"
    assert manager.registry.list_operators() == ["silu_and_mul"], "all or nothing"
    assert warnings == [
        f"entry_point 'bad' of vllm-fl-bad is left out, none of its implementations is registered: {problem}"
    ]
    bad, fine = plugin_reports()
    assert (bad.name, bad.source, bad.distribution, bad.ok, bad.error) == (
        "bad",
        "entry_point",
        "vllm-fl-bad",
        False,
        problem,
    )
    assert bad.details.startswith("Traceback")
    assert fine.ok
    assert get_discovered_plugins() == [("bad", "entry_point", False), ("good", "entry_point", True)]


def test_a_failure_is_reported_once(points: list[Point], warnings: list[str]) -> None:
    points.append(Point("bad", ImportError("no")))
    for _ in range(3):
        discover_plugins(OpRegistry())
    assert len(warnings) == 1


def test_duplicate_between_distributions(points: list[Point], warnings: list[str]) -> None:
    points += [Point("one", good("acme")), Point("two", good("acme"))]
    assert OpManager().call("silu_and_mul", 1) == "acme"
    assert warnings == [
        "entry_point 'two' of vllm-fl-two is left out, none of its implementations is registered: RegistrationError:"
        " silu_and_mul: implementation 'vendor.acme' is registered already by entry_point 'one' of vllm-fl-one; give"
        " the second one another impl_id; update it, report it to its maintainers, or remove it"
        " (pip uninstall vllm-fl-two)"
    ]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def write(name: str, body: str) -> None:
        (tmp_path / f"{name}.py").write_text(body)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


FUNCTION = """
from dispatch_helpers import silu, vendor

def {function}(registry):
    registry.register_impl(vendor("acme", "silu_and_mul", silu("served")))
"""


@pytest.mark.parametrize("function", ["vllm_fl_register", "register", "register_builtins"])
def test_modules_of_the_variable(function: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module(f"acme_{function}", FUNCTION.format(function=function))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", f"acme_{function}")
    reset_settings()
    assert call_op("silu_and_mul", 1) == "served"
    assert get_discovered_plugins() == [(f"acme_{function}", "env", True)]
    assert discover_from_env_modules(OpRegistry()) == 1


def test_module_without_a_register_function(module: Any, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    module("acme_wrong", "def registr(registry): pass\n")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_wrong,acme_missing")
    reset_settings()
    assert discover_plugins(OpRegistry()) == 0
    remedy = "correct the module, or VLLM_FL_PLUGIN_MODULES, which names it"
    assert warnings == [
        "env 'acme_wrong' of module acme_wrong is left out, none of its implementations is registered:"
        " RegistrationError: module 'acme_wrong' has none of the functions vllm_fl_register, register,"
        f" register_builtins; did you mean 'registr'?; {remedy}",
        "env 'acme_missing' of module acme_missing is left out, none of its implementations is registered:"
        f" ModuleNotFoundError: No module named 'acme_missing'; {remedy}",
    ]


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[InstalledBackend]:
    found: list[InstalledBackend] = []
    monkeypatch.setattr("vllm_fl.plugins.installed_backends", lambda: tuple(found))
    return found


def test_installed_backends_register(backends: list[InstalledBackend], module: Any) -> None:
    module("acme_ops", FUNCTION.format(function="register"))
    plugin = BackendPlugin("acme", BackendImplKind.VENDOR, vendor="acme", register="acme_ops:register")
    unusable = BackendPlugin("old", BackendImplKind.VENDOR, vendor="old", register="nowhere:register")
    silent = BackendPlugin("platform", BackendImplKind.REFERENCE)
    backends += [
        InstalledBackend(plugin, "vllm-fl-acme", "acme", None),
        InstalledBackend(unusable, "vllm-fl-old", "old", "needs torch_old"),
        InstalledBackend(silent, "vllm-fl-platform", "platform", None),
        InstalledBackend(None, "vllm-fl-broken", "broken", "its import raised"),
    ]
    assert call_op("silu_and_mul", 1) == "served"
    assert get_discovered_plugins() == [("acme", "backend", True)]
    assert get_default_manager().registry.owner("silu_and_mul", "vendor.acme") == "backend 'acme' of vllm-fl-acme"


def test_names_of_the_configuration_are_checked_after_registration(
    points: list[Point], monkeypatch: pytest.MonkeyPatch
) -> None:
    points.append(Point("acme", good("acme")))
    monkeypatch.setenv("VLLM_FL_PER_OP", "silu_and_mul=vendor:acmee|reference")
    reset_global_policy()
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            call_op("silu_and_mul", 1)
        assert "unknown vendor 'acmee'" in str(caught.value)
        assert "did you mean 'acme'?" in str(caught.value)
        assert "VLLM_FL_PER_OP" in str(caught.value)
    monkeypatch.setenv("VLLM_FL_PER_OP", "silu_and_mul=vendor:acme|reference")
    reset_global_policy()
    assert call_op("silu_and_mul", 1) == "acme"


def test_vendor_of_an_installed_backend_without_operators_is_known(
    backends: list[InstalledBackend], monkeypatch: pytest.MonkeyPatch, points: list[Point]
) -> None:
    points.append(Point("acme", good("acme")))
    plugin = BackendPlugin("bare", BackendImplKind.VENDOR, vendor="bare")
    backends.append(InstalledBackend(plugin, "vllm-fl-bare", "bare", None))
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "bare")
    reset_global_policy()
    assert call_op("silu_and_mul", 1) == "acme"


def test_dispatch_debug_logs_every_operator(
    points: list[Point], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points.append(Point("acme", good("acme")))
    monkeypatch.setenv("VLLM_FL_DISPATCH_DEBUG", "1")
    reset_global_policy()
    manager = get_default_manager()
    manager.registry.register_impl(reference("silu_and_mul", silu(0)))
    manager.ensure_initialized()
    assert manager.selection("silu_and_mul").explain() in capsys.readouterr().err
