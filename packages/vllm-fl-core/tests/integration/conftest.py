"""vLLM in this process, on the CPU reference platform, with our layers registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_fl.config import reset_settings
from vllm_fl.dispatch import bind, get_default_manager

pytest.importorskip("vllm", reason="the integration is tested with vLLM installed")


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """What vLLM does in every process, and what our workers do before they load a model."""
    from vllm.plugins import load_general_plugins

    from vllm_fl.integration import layers

    load_general_plugins()
    layers.register()


@pytest.fixture
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Settings that are read again, now and after the test; set variables with what this yields."""
    reset_settings()
    with monkeypatch.context() as patch:
        yield patch
    reset_settings()


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    """vLLM's configuration without a model, as the current one: layers can be built."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config), torch.no_grad():
        yield config


class Spy:
    """Stands before a bound operator and counts its calls."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        op, inner = bind(name), get_default_manager().find(name)

        def spied(*args: Any) -> Any:
            self.calls += 1
            return inner(*args)

        patch.setattr(op, "fn", spied)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`spy(name)` counts the calls that reach the operator `name` from then on."""
    return lambda name: Spy(name, monkeypatch)
