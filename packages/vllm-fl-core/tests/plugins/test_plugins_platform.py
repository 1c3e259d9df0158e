"""Which backend becomes the platform, and why the others do not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from vllm_fl.config import get_settings, reset_settings
from vllm_fl.errors import ConfigError, PlatformError
from vllm_fl.plugins import PlatformChoice, reset_platform, resolve_platform

IsNative = Callable[[bool, str], None]


@pytest.fixture(autouse=True)
def _not_native(is_native: IsNative) -> None:
    is_native(False, "vLLM 0.28.0 was built for no device of this machine")


def chosen(choice: PlatformChoice) -> str | None:
    return choice.plugin.name if choice.plugin is not None else None


def reference(site: Any, **fields: Any) -> None:
    site.backend("reference", kind="reference", vendor=None, device_type="cpu", fallback=True, **fields)


def test_the_one_whose_probe_succeeds(site: Any) -> None:
    site.backend("acme")
    site.backend("beta", "return Availability(False, 'no /dev/beta0')")
    site.backend("gamma", "return False")
    reference(site)
    choice = resolve_platform()
    assert (chosen(choice), choice.reason) == ("acme", "its probe succeeds")
    assert choice.rejected == (
        ("beta", "no /dev/beta0"),
        ("gamma", "its probe finds no device"),
        ("reference", "a fallback, and 'acme' fits"),
    )


def test_decided_once(site: Any) -> None:
    site.backend("acme", "import acme_count; acme_count.N += 1; return True")
    (site.folder / "acme_count.py").write_text("N = 0\n")
    first = resolve_platform()
    assert resolve_platform() is first
    assert sys.modules["acme_count"].N == 1


def test_two_that_fit(site: Any) -> None:
    for name in ("acme", "beta"):
        site.backend(name)
    reference(site)
    with pytest.raises(PlatformError) as caught:
        resolve_platform()
    assert str(caught.value) == (
        "more than one platform fits this machine: 'acme' of vllm-fl-acme and 'beta' of vllm-fl-beta; "
        "choose one: VLLM_FL_PLATFORM=acme or VLLM_FL_PLATFORM=beta"
    )


def test_two_that_fit_and_a_choice(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme", "beta"):
        site.backend(name)
    monkeypatch.setenv("VLLM_FL_PLATFORM", "beta")
    choice = resolve_platform()
    assert (chosen(choice), choice.reason) == ("beta", "asked for by environment variable VLLM_FL_PLATFORM")
    assert choice.rejected == (("acme", "environment variable VLLM_FL_PLATFORM names 'beta'"),)


def test_fallback_where_nothing_else_fits(site: Any) -> None:
    reference(site)
    site.backend("acme", "return False")
    choice = resolve_platform()
    assert chosen(choice) == "reference"
    assert choice.reason == "no other backend fits, and vLLM 0.28.0 was built for no device of this machine"


def test_fallback_without_a_probe(site: Any) -> None:
    reference(site, probe=None)
    assert chosen(resolve_platform()) == "reference"


def test_fallback_is_silent_where_vllm_has_a_platform(site: Any, is_native: IsNative) -> None:
    is_native(True, "vLLM 0.28.0+cpu is a CPU build")
    reference(site)
    choice = resolve_platform()
    assert (chosen(choice), choice.reason) == (
        None,
        "no backend fits, and vLLM has a platform of its own (vLLM 0.28.0+cpu is a CPU build)",
    )
    assert choice.rejected == (
        (
            "reference",
            "a fallback, and vLLM has a platform of its own (vLLM 0.28.0+cpu is a CPU build); "
            "VLLM_FL_PLATFORM=reference asks for it",
        ),
    )


def test_fallback_where_vllm_has_a_platform_and_it_is_asked_for(
    site: Any, is_native: IsNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_native(True, "vLLM 0.28.0+cpu is a CPU build")
    reference(site)
    monkeypatch.setenv("VLLM_FL_PLATFORM", "reference")
    assert chosen(resolve_platform()) == "reference"


def test_a_vendor_platform_is_chosen_over_vllms_own(site: Any, is_native: IsNative) -> None:
    is_native(True, "vLLM has CUDA kernels and there is an NVIDIA device")
    site.backend("acme")
    assert chosen(resolve_platform()) == "acme"


def test_nothing_fits(site: Any) -> None:
    site.backend("acme", "return False")
    assert resolve_platform() == PlatformChoice(None, "no backend fits", (("acme", "its probe finds no device"),))


def test_backends_that_bring_no_platform(site: Any) -> None:
    site.backend("acme", platform=None)
    site.backend("beta", "return Availability(False, 'no operators yet')", platform=None)
    assert resolve_platform().rejected == (("acme", "it brings no platform"), ("beta", "no operators yet"))


def test_backend_without_a_probe(site: Any) -> None:
    site.backend("acme", probe=None)
    assert resolve_platform().rejected == (("acme", "it declares no probe; VLLM_FL_PLATFORM=acme asks for it"),)


PROBES = {
    "raises": (
        "raise OSError('libacme.so: cannot open shared object file')",
        "its probe acme_plugin:probe raised OSError: libacme.so: cannot open shared object file",
    ),
    "exits": ("raise SystemExit(1)", "its probe acme_plugin:probe raised SystemExit: 1"),
    "answers with something else": (
        "return 'yes'",
        "its probe acme_plugin:probe returned 'yes', expected a bool or an Availability",
    ),
}


@pytest.mark.parametrize(("body", "reason"), PROBES.values(), ids=PROBES)
def test_probe_that_fails(site: Any, warnings: list[str], body: str, reason: str) -> None:
    site.backend("acme", body)
    site.backend("beta")
    choice = resolve_platform()
    assert (chosen(choice), choice.rejected) == ("beta", (("acme", reason),))
    resolve_platform()
    assert warnings == [f"backend 'acme' of vllm-fl-acme: {reason}; reinstall or update vllm-fl-acme"]


def test_probe_that_is_not_there(site: Any) -> None:
    site.backend("acme", probe="acme_plugin:prob")
    assert resolve_platform().rejected == (
        (
            "acme",
            "its probe acme_plugin:prob raised AttributeError: module 'acme_plugin' has no attribute 'prob'",
        ),
    )


def test_backend_that_cannot_be_loaded_leaves_the_others_alone(site: Any, warnings: list[str]) -> None:
    site.backend("acme", top="import acme_sdk")
    site.backend("beta")
    choice = resolve_platform()
    assert chosen(choice) == "beta"
    assert choice.rejected[0][1].startswith(
        "loading acme_plugin:PLUGIN raised ModuleNotFoundError: No module named 'acme_sdk'; repair it"
    )
    assert len(warnings) == 1


REQUESTS = {
    "misspelt": (
        "acmee",
        "platform 'acmee' is not installed (installed platforms: acme, reference; to install it: "
        "pip install vllm-fl-acmee); did you mean 'acme'?",
    ),
    "not installed": (
        "xyz",
        "platform 'xyz' is not installed (installed platforms: acme, reference; to install it: "
        "pip install vllm-fl-xyz)",
    ),
    "device type": (
        "cpu",
        "platform 'cpu' is not installed (installed platforms: acme, reference; to install it: "
        "pip install vllm-fl-cpu); did you mean 'reference'?",
    ),
    "without a platform": (
        "extra",
        "backend 'extra' of vllm-fl-extra brings no platform, no operators yet (installed platforms: acme, reference)",
    ),
    "broken": (
        "broken",
        "backend 'broken' of vllm-fl-broken cannot be used: loading broken_plugin:PLUGIN raised RuntimeError: no; "
        "repair it (pip install --force-reinstall vllm-fl-broken) or remove it (pip uninstall vllm-fl-broken)",
    ),
}


@pytest.mark.parametrize(("name", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_request_that_cannot_be_met(site: Any, monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    site.backend("acme")
    site.backend("extra", "return Availability(False, 'no operators yet')", platform=None)
    site.backend("broken", top="raise RuntimeError('no')")
    reference(site)
    monkeypatch.setenv("VLLM_FL_PLATFORM", name)
    with pytest.raises(PlatformError) as caught:
        resolve_platform()
    assert str(caught.value) == f"environment variable VLLM_FL_PLATFORM: {expected}"


def test_request_where_nothing_is_installed(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PLATFORM", "ascend")
    with pytest.raises(PlatformError) as caught:
        resolve_platform()
    assert str(caught.value) == (
        "environment variable VLLM_FL_PLATFORM: platform 'ascend' is not installed (installed platforms: none; "
        "to install it: pip install vllm-fl-ascend)"
    )


def test_request_by_a_file(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("acme")
    path = site.folder / "my.yaml"
    path.write_text("strict: no\nplatform: acmee\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(path))
    with pytest.raises(PlatformError, match=r"my\.yaml:2:1: platform 'acmee' is not installed"):
        resolve_platform()


def test_request_against_the_probe(site: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("acme", "return Availability(False, 'no /dev/acme0')")
    monkeypatch.setenv("VLLM_FL_PLATFORM", "acme")
    choice = resolve_platform()
    reason = "asked for by environment variable VLLM_FL_PLATFORM, against its probe: no /dev/acme0"
    assert (chosen(choice), choice.reason) == ("acme", reason)
    assert warnings == [f"platform 'acme' is {reason}"]


def test_wrong_configuration_is_reported_first(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme", "beta"):
        site.backend(name)
    monkeypatch.setenv("VLLM_FL_PREFER", "flaggems")
    with pytest.raises(ConfigError, match="'flaggems' is not one of"):
        resolve_platform()


def test_the_platforms_file_reaches_the_settings(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("acme", config="acme_data:acme.yaml")
    (site.folder / "acme_data").mkdir()
    (site.folder / "acme_data" / "__init__.py").touch()
    (site.folder / "acme_data" / "acme.yaml").write_text("prefer: vendor\nstrict: yes\n")
    monkeypatch.setenv("VLLM_FL_STRICT", "0")
    settings = get_settings()
    assert (settings.prefer, str(settings.origin("prefer"))) == ("vendor", "platform file acme.yaml:1:1")
    assert (settings.strict, str(settings.origin("strict"))) == (False, "environment variable VLLM_FL_STRICT")


def test_reset(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("acme")
    assert chosen(resolve_platform()) == "acme"
    site.backend("beta")
    reset_platform()
    reset_settings()
    monkeypatch.setenv("VLLM_FL_PLATFORM", "beta")
    assert chosen(resolve_platform()) == "beta"


def test_resolution_imports_neither_torch_nor_vllm(site: Any) -> None:
    site.backend("acme")
    code = (
        "import sys; from vllm_fl.plugins import resolve_platform; choice = resolve_platform(); "
        "print(choice.plugin.name, [name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    environ = {**os.environ, "PYTHONPATH": str(site.folder), "VLLM_FL_PLATFORM": "acme"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert result.stdout == "acme []\n"
