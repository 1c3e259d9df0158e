"""What a chosen communicator changes in a process: the class, the backend of the groups, the KV connectors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl import integration
from vllm_fl.integration import communication
from vllm_fl.integration.platform import FLPlatform
from vllm_fl.plugins import CommunicatorPlugin, communicators, loading
from vllm_fl.plugins.loading import Loaded

HERE = __name__


def path(device_type: str) -> str:
    return f"acme.For_{device_type}"


def backend(device_type: str) -> str | None:
    return None if device_type == "cpu" else "acme"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def communicator(**fields: Any) -> None:
        plugin = CommunicatorPlugin("acme", f"{HERE}:path", variables=("ACME_PATH",), **fields)
        monkeypatch.setitem(loading._cache, communicators.COMMUNICATOR_GROUP, (Loaded(plugin, "acme-comm", "acme"),))
        monkeypatch.setenv("ACME_PATH", "/opt/acme")
        monkeypatch.delenv("FLAGCX_PATH", raising=False)

    monkeypatch.setattr(communication, "_registered", set())
    return communicator


class OwnPlatform(FLPlatform):
    device_type = "cpu"
    communicator_cls = "own.Communicator"


class PlatformOfVLLM(FLPlatform):
    device_type = "cpu"


def test_the_chosen_class_comes_first(install: Callable[..., None]) -> None:
    install()
    assert OwnPlatform.get_device_communicator_cls() == "acme.For_cpu"


def test_else_the_platforms_own_and_else_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLAGCX_PATH", raising=False)
    assert OwnPlatform.get_device_communicator_cls() == "own.Communicator"
    assert PlatformOfVLLM.get_device_communicator_cls().endswith(".DeviceCommunicatorBase")


@pytest.mark.parametrize(("device_type", "expected"), [("npu", "acme"), ("cpu", "own")])
def test_the_groups_are_made_by_its_backend(install: Callable[..., None], device_type: str, expected: str) -> None:
    install(dist_backend=f"{HERE}:backend")
    platform = SimpleNamespace(device_type=device_type, dist_backend="own")
    communication.prepare(platform)
    assert platform.dist_backend == expected


def test_without_a_backend_of_its_own_the_platforms_stays(install: Callable[..., None]) -> None:
    install()
    platform = SimpleNamespace(device_type="npu", dist_backend="own")
    communication.prepare(platform)
    assert platform.dist_backend == "own"


def test_a_variable_without_effect_draws_one_warning(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(integration, "_warned", set())
    monkeypatch.delenv("FLAGCX_PATH", raising=False)
    integration._warn_of_unused_communicator(SimpleNamespace())
    assert warnings == []
    monkeypatch.setenv("FLAGCX_PATH", "/opt/flagcx")
    for _ in range(2):
        integration._warn_of_unused_communicator(SimpleNamespace())
    assert warnings == [
        "environment variable FLAGCX_PATH has no effect: vLLM runs on its own platform SimpleNamespace, with its own"
        " communicator; install the distribution of this device (such as vllm-fl-nvidia), or unset the variable"
    ]


def test_its_kv_connectors_are_known_to_vllm(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    install(kv_connectors=(("AcmeConnector", f"{HERE}:PlatformOfVLLM"),))
    for _ in range(2):  # vLLM calls the plug-in more than once
        communication.prepare(SimpleNamespace(device_type="cpu", dist_backend="gloo"))
    assert KVConnectorFactory._registry["AcmeConnector"]() is PlatformOfVLLM
