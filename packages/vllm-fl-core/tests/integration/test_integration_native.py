"""Layers of a loaded model that vLLM's own code takes over, and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

from vllm_fl.dispatch import BackendImplKind, OpImpl, get_default_manager, reset_default_manager, set_global_policy
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.integration.layers import native
from vllm_fl.integration.layers.native import follow_selection, left_to_vllm

ACME, REFERENCE = "vendor:acme", "reference"


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((*x.shape[:-1], x.shape[-1] // 2), 7.0)


@pytest.fixture
def model(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """On a platform whose own layers are those of the vendor ``acme``."""
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    manager.registry.register_impl(
        OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu_and_mul, vendor="acme")
    )
    monkeypatch.setattr(type(current_platform), "native_vendor", "acme")
    yield torch.nn.Sequential(SiluAndMul(), torch.nn.Identity())
    reset_default_manager()
    set_global_policy(SelectionPolicy())


def select(token: str) -> None:
    set_global_policy(SelectionPolicy(per_op_order=(("silu_and_mul", (token,)),)))


def test_a_layer_follows_the_selection(model: Any, spy: Any) -> None:
    x = torch.ones(2, 4)
    select(ACME)
    assert follow_selection(model, ["none", "+silu_and_mul"]) == {"silu_and_mul": "vendor.acme"}
    seen = spy("silu_and_mul")
    torch.testing.assert_close(model(x), model[0].forward_native(x))
    assert seen.calls == 0
    select(REFERENCE)
    assert follow_selection(model, ["none", "+silu_and_mul"]) == {}
    seen = spy("silu_and_mul")
    torch.testing.assert_close(model(x), torch.nn.functional.silu(x[:, :2]))
    assert seen.calls == 1


def test_where_layers_are_on_the_kernel_of_vllm_serves(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiluAndMul, "forward_cuda", lambda self, x: x + 1.0)
    select(ACME)
    follow_selection(model, ["all"])
    assert float(model(torch.ones(1))) == 2.0


@pytest.mark.parametrize("custom_ops", [["none"], ["all", "-silu_and_mul"]])
def test_a_layer_that_is_switched_off_stays_off(model: Any, custom_ops: list[str], spy: Any) -> None:
    model[0]._forward_method = model[0].forward_native  # as vLLM does
    select(REFERENCE)
    assert follow_selection(model, custom_ops) == {}
    seen = spy("silu_and_mul")
    model(torch.ones(1, 4))
    assert seen.calls == 0


def test_layers_that_prepare_their_weights_are_left_to_a_new_engine(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = type("FLMoERunner", (torch.nn.Module,), {"__module__": "vllm_fl.integration.layers.moe"})
    select(ACME)
    model.append(ours())
    assert left_to_vllm(model) == []
    monkeypatch.setattr(native, "replaced", lambda vendor: ())
    assert left_to_vllm(model) == ["fused_moe", "unquantized_fused_moe_method"]


def test_a_platform_without_layers_of_its_own_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "native_vendor", None)
    select(ACME)
    assert follow_selection(model, ["none", "+silu_and_mul"]) == {}
    assert float(model(torch.ones(1, 4))[0, 0]) == 7.0
