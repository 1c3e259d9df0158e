"""Which communicator is chosen: by name, by its variable, or none; and what each mistake says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from vllm_fl.errors import PlatformError
from vllm_fl.plugins import (
    CommunicatorPlugin,
    choose_communicator,
    communicator_class,
    installed_communicators,
    reset_plugins,
)

if TYPE_CHECKING:
    from conftest import Site


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    reset_plugins()
    yield
    reset_plugins()


@pytest.fixture
def install(site: Site) -> Callable[..., None]:
    """``install("acme", variables=("ACME_PATH",))``: the distribution acme-comm with the communicator acme."""

    def communicator(name: str, top: str = "", distribution: str = "", **fields: object) -> None:
        arguments = ", ".join(f"{key}={value!r}" for key, value in fields.items())
        module = f"{name}_comm"
        site.install(
            distribution or f"{name}-comm",
            entry_points={"vllm_fl.communicators": {name: f"{module}:PLUGIN"}},
            files={
                f"{module}.py": f"""
{top}
from vllm_fl.plugins import CommunicatorPlugin
PLUGIN = CommunicatorPlugin({name!r}, "{module}:path", {arguments})
def path(device_type):
    return "{module}.For" + device_type
"""
            },
        )

    return communicator


def message() -> str:
    with pytest.raises(PlatformError) as caught:
        choose_communicator()
    return str(caught.value)


def test_without_any_it_is_the_platforms_own(site: Site) -> None:
    assert installed_communicators() == ()
    assert choose_communicator().plugin is None
    assert communicator_class("cpu") is None


def test_installed_and_not_asked_for(install: Callable[..., None]) -> None:
    install("acme", variables=("ACME_PATH",))
    choice = choose_communicator()
    assert (choice.plugin, choice.reason) == (None, "no communicator is asked for")


def test_its_variable_selects_it(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme", variables=("ACME_PATH",))
    monkeypatch.setenv("ACME_PATH", "/opt/acme")
    assert choose_communicator().reason == "selected by environment variable ACME_PATH"
    assert communicator_class("npu") == "acme_comm.Fornpu"


def test_the_key_selects_it(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme")
    monkeypatch.setenv("VLLM_FL_COMM", "acme")
    assert choose_communicator().reason == "asked for by environment variable VLLM_FL_COMM"
    assert communicator_class("cpu") == "acme_comm.Forcpu"


def test_native_switches_them_off(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme", variables=("ACME_PATH",))
    monkeypatch.setenv("ACME_PATH", "/opt/acme")
    monkeypatch.setenv("VLLM_FL_COMM", "native")
    assert communicator_class("cpu") is None


def test_two_variables(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme", "bolt"):
        install(name, variables=(f"{name.upper()}_PATH",))
        monkeypatch.setenv(f"{name.upper()}_PATH", "/opt")
    assert message() == (
        "several communicators are selected: 'acme' by environment variable ACME_PATH and 'bolt' by environment"
        " variable BOLT_PATH; choose one with VLLM_FL_COMM"
    )


def test_not_installed(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme")
    monkeypatch.setenv("VLLM_FL_COMM", "akme")
    assert message() == (
        "environment variable VLLM_FL_COMM: communicator 'akme' is not installed (installed: native, acme); did you"
        " mean 'acme'?"
    )


def test_one_that_does_not_load(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    install("acme", top="raise OSError('no such thing')")
    error = (
        "loading acme_comm:PLUGIN raised OSError: no such thing; repair it (pip install --force-reinstall acme-comm) or"
        " remove it (pip uninstall acme-comm)"
    )
    assert [item.error for item in installed_communicators()] == [error]
    assert warnings == [f"communicator 'acme' of acme-comm cannot be used: {error}"]
    assert choose_communicator().plugin is None
    monkeypatch.setenv("VLLM_FL_COMM", "acme")
    assert message() == f"environment variable VLLM_FL_COMM: communicator 'acme' of acme-comm cannot be used: {error}"


def test_something_else_under_its_name(site: Site) -> None:
    site.install(
        "acme-comm",
        entry_points={"vllm_fl.communicators": {"acme": "acme_comm:PLUGIN"}},
        files={"acme_comm.py": "PLUGIN = 1"},
    )
    (item,) = installed_communicators()
    assert item.error is not None
    assert item.error.startswith("acme_comm:PLUGIN is of type int, expected vllm_fl.plugins.CommunicatorPlugin; ")


def test_two_distributions_of_one_name(install: Callable[..., None]) -> None:
    install("acme")
    install("acme", distribution="other-comm")
    assert {item.error for item in installed_communicators()} == {
        "several distributions bring a communicator of this name: acme-comm, other-comm; uninstall all but one"
    }


def test_requirements_are_judged_first(install: Callable[..., None]) -> None:
    install("acme", requires=("acme-driver>=2",))
    (item,) = installed_communicators()
    assert item.error == "it needs acme-driver>=2, and acme-driver is not installed; pip install 'acme-driver>=2'"


def test_a_requirement_of_the_wrong_form() -> None:
    with pytest.raises(ValueError, match=r"^CommunicatorPlugin 'x': '>1' is not a requirement: "):
        CommunicatorPlugin("x", "a:b", requires=(">1",))


def test_a_variable_whose_distribution_is_missing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGCX_PATH", "/opt/flagcx")
    assert message() == (
        "environment variable FLAGCX_PATH asks for a communicator that vllm-fl-comm brings, and which is not there: pip"
        " install vllm-fl-comm, or unset the variable"
    )
    monkeypatch.setenv("VLLM_FL_COMM", "native")
    assert choose_communicator().plugin is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("native", "a:b"), "CommunicatorPlugin: the name 'native' stands for the platform's own communicator"),
        (("x", "a.b"), "CommunicatorPlugin 'x': communicator 'a.b' is not of the form 'package.module:function'"),
        (("x", "a:b", "c"), "CommunicatorPlugin 'x': status 'c' is not of the form 'package.module:function'"),
        (
            ("x", "a:b", None, (), "d"),
            "CommunicatorPlugin 'x': dist_backend 'd' is not of the form 'package.module:function'",
        ),
        (
            ("x", "a:b", None, (), None, (("Acme", "a.B"),)),
            "CommunicatorPlugin 'x': KV connector Acme 'a.B' is not of the form 'package.module:Class'",
        ),
        (("x y", "a:b"), "CommunicatorPlugin: 'x y' is not a name (letters, digits, '_', '-', '.')"),
    ],
    ids=["reserved name", "class path", "status", "backend", "connector", "no name"],
)
def test_a_descriptor_of_the_wrong_form(arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        CommunicatorPlugin(*arguments)
    assert str(caught.value) == expected
