"""Backends that are installed, and what is said about those that cannot be used."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.errors import PlatformError
from vllm_fl.plugins import BackendPlugin, installed_backends, load_object, platform_file, requirement_problem


def remedy(name: str) -> str:
    return f"repair it (pip install --force-reinstall {name}) or remove it (pip uninstall {name})"


def test_no_backend(site: Any) -> None:
    assert installed_backends() == ()


def test_backends_by_name_read_once(site: Any) -> None:
    site.backend("beta")
    site.backend("alpha", device_type="npu")
    found = installed_backends()
    assert [(b.entry_point, b.distribution, b.error) for b in found] == [
        ("alpha", "vllm-fl-alpha", None),
        ("beta", "vllm-fl-beta", None),
    ]
    assert found[0].plugin == BackendPlugin(
        "alpha",
        BackendImplKind.VENDOR,
        vendor="alpha",
        device_type="npu",
        probe="alpha_plugin:probe",
        platform="alpha_platform.Platform",
    )
    site.backend("gamma")
    assert installed_backends() is found


BROKEN = {
    "missing module": (
        "import acme_sdk",
        "ModuleNotFoundError: No module named 'acme_sdk'",
    ),
    "own exception": (
        "raise RuntimeError('driver 5 is too old')",
        "RuntimeError: driver 5 is too old",
    ),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
}


@pytest.mark.parametrize(("top", "raised"), BROKEN.values(), ids=BROKEN)
def test_import_that_raises(site: Any, warnings: list[str], top: str, raised: str) -> None:
    site.backend("acme", top=top)
    site.backend("good")
    broken, good = installed_backends()
    expected = f"loading acme_plugin:PLUGIN raised {raised}; {remedy('vllm-fl-acme')}"
    assert (broken.plugin, broken.distribution, broken.error) == (None, "vllm-fl-acme", expected)
    assert good.error is None
    installed_backends()
    assert warnings == [f"backend 'acme' of vllm-fl-acme cannot be used: {expected}"]


def test_interrupt_is_passed_on(site: Any) -> None:
    site.backend("acme", top="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        installed_backends()


def test_missing_attribute(site: Any) -> None:
    site.install("acme", entry_points={"vllm_fl.backends": {"acme": "acme_other:PLUGIN"}}, files={"acme_other.py": ""})
    (backend,) = installed_backends()
    assert backend.error == (
        "loading acme_other:PLUGIN raised AttributeError: module 'acme_other' has no attribute 'PLUGIN'; "
        + remedy("acme")
    )


def test_not_a_descriptor(site: Any) -> None:
    point = {"vllm_fl.backends": {"acme": "acme_other:PLUGIN"}}
    site.install("acme", entry_points=point, files={"acme_other.py": "PLUGIN = {}"})
    (backend,) = installed_backends()
    assert backend.error == (
        f"acme_other:PLUGIN is of type dict, expected vllm_fl.plugins.BackendPlugin; {remedy('acme')}"
    )


def test_wrong_descriptor(site: Any) -> None:
    site.backend("acme", vendor=None)
    (backend,) = installed_backends()
    assert backend.error == (
        "loading acme_plugin:PLUGIN raised ValueError: BackendPlugin 'acme' is of kind vendor but names no vendor; "
        + remedy("vllm-fl-acme")
    )


def test_two_names(site: Any) -> None:
    site.backend("acme", name="acmee")
    (backend,) = installed_backends()
    expected = f"acme_plugin:PLUGIN is named 'acmee', its entry point 'acme'; {remedy('vllm-fl-acme')}"
    assert backend.error == expected


def test_two_distributions_of_one_name(site: Any) -> None:
    site.backend("acme")
    site.install("acme-fork", entry_points={"vllm_fl.backends": {"acme": "acme_fork:PLUGIN"}})
    expected = "several distributions bring a backend of this name: acme-fork, vllm-fl-acme; uninstall all but one"
    assert [backend.error for backend in installed_backends()] == [expected, expected]
    assert "acme_plugin" not in sys.modules


def test_requirements_are_judged_from_metadata(site: Any, warnings: list[str]) -> None:
    site.install("acme-sdk", "1.4", files={"acme_sdk.py": "raise AssertionError('imported')"})
    site.backend("acme", needs=("acme-sdk>=2",))  # what pip was told is pip's business, unless it is the core
    site.backend("beta", probe="acme_sdk:probe", requires=("acme-sdk>=2", "not-there", "acme-sdk<2"))
    acme, beta = installed_backends()
    expected = (
        "it needs acme-sdk>=2, and acme-sdk 1.4 is installed; pip install 'acme-sdk>=2'; "
        "it needs not-there, and not-there is not installed; pip install 'not-there'"
    )
    assert (acme.error, beta.error) == (None, expected)
    assert warnings == [f"backend 'beta' of vllm-fl-beta cannot be used: {expected}"]


def test_another_core_is_found_before_anything_is_imported(site: Any) -> None:
    site.install("vllm-fl-core", "0.1.0")
    site.backend("acme", needs=("vllm-fl-core==7.0",), top="raise AssertionError('imported')")
    (backend,) = installed_backends()
    assert backend.error == (
        "it needs vllm-fl-core==7.0, and vllm-fl-core 0.1.0 is installed; pip install 'vllm-fl-core==7.0'"
    )


@pytest.mark.parametrize(
    ("installed", "requirement", "met"),
    [
        ("2.13.0+cpu", "acme==2.13.0", True),
        ("2.13.0.dev1", "acme>=2.12", True),
        ("2.13.0", "acme<2.13", False),
        ("2.13.0", "acme>=99; python_version < '3'", True),
        ("2.13.0", "acme>=99; extra == 'gpu'", True),
        ("unknown", "acme>=1", False),
    ],
)
def test_requirements(site: Any, installed: str, requirement: str, met: bool) -> None:
    site.install("acme", installed)
    assert (requirement_problem(requirement) is None) is met


DESCRIPTORS: dict[str, tuple[dict[str, Any], str]] = {
    "probe": (
        {"probe": "acme.probe"},
        "BackendPlugin 'acme': probe 'acme.probe' is not of the form 'package.module:function'",
    ),
    "register": (
        {"register": "acme:"},
        "BackendPlugin 'acme': register 'acme:' is not of the form 'package.module:function'",
    ),
    "platform": (
        {"platform": "acme:Platform"},
        "BackendPlugin 'acme': platform 'acme:Platform' is not of the form 'package.module.Class'",
    ),
    "config": (
        {"config": "acme.yaml"},
        "BackendPlugin 'acme': config 'acme.yaml' is not of the form 'package:file.yaml'",
    ),
    "name": ({"name": "a b"}, "BackendPlugin: 'a b' is not a name (letters, digits, '_', '-', '.')"),
    "kind": (
        {"kind": "vendr"},
        "BackendPlugin 'acme': 'vendr' is not one of flagos, vendor, reference; did you mean 'vendor'?",
    ),
}


@pytest.mark.parametrize(("fields", "expected"), DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_descriptor_of_a_wrong_form(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        BackendPlugin(**{"name": "acme", "kind": BackendImplKind.VENDOR, "vendor": "acme", **fields})
    assert str(caught.value) == expected


def test_descriptor_with_a_wrong_requirement() -> None:
    with pytest.raises(ValueError, match=r"BackendPlugin 'acme': '>=1' is not a requirement: "):
        BackendPlugin("acme", BackendImplKind.REFERENCE, requires=(">=1",))


def test_load_object() -> None:
    assert load_object("vllm_fl.plugins:BackendPlugin") is BackendPlugin
    assert load_object("vllm_fl.plugins:BackendPlugin.__name__") == "BackendPlugin"


def test_platform_file(site: Any) -> None:
    site.install("acme", files={"acme_data/__init__.py": "", "acme_data/acme.yaml": "strict: yes\n"})
    plugin = BackendPlugin("acme", BackendImplKind.REFERENCE, config="acme_data:acme.yaml")
    file = platform_file(plugin)
    assert file is not None
    assert (file.name, file.read_bytes()) == ("acme.yaml", b"strict: yes\n")
    assert platform_file(BackendPlugin("acme", BackendImplKind.REFERENCE)) is None


def test_platform_file_of_a_package_that_is_not_there() -> None:
    plugin = BackendPlugin("acme", BackendImplKind.REFERENCE, config="no_such_package:acme.yaml")
    with pytest.raises(PlatformError) as caught:
        platform_file(plugin)
    assert str(caught.value) == (
        "backend 'acme': the package of its platform file 'no_such_package:acme.yaml' cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_package'; reinstall the backend's distribution"
    )
