"""What the CPU reference platform says to features that it has in part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the features are vLLM's")
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from vllm_fl.errors import ConfigError
from vllm_fl_reference import features
from vllm_fl_reference.worker import ReferenceWorker


def config(**parts: Any) -> SimpleNamespace:
    compilation = SimpleNamespace(mode=None)
    return SimpleNamespace(
        **{"speculative_config": None, "lora_config": None, "compilation_config": compilation, **parts}
    )


def test_drafting_by_a_model_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        features.settle_speculation(config(speculative_config=SimpleNamespace(method="eagle3")))
    assert str(caught.value) == (
        "--speculative-config: drafting by method 'eagle3' needs kernels that the CPU reference platform does not have;"
        " choose 'ngram', or leave the option out"
    )


def test_drafting_by_ngrams_needs_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(speculative_config=SimpleNamespace(method="ngram"))
    features.settle_speculation(asked)
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        features.settle_speculation(asked)
    assert str(caught.value) == (
        "--speculative-config: vLLM's method 'ngram' needs numba, which is not installed;"
        " remedy: pip install 'vllm-fl-reference[speculation]'"
    )


def with_adapters(experts: int, mode: CompilationMode | None) -> SimpleNamespace:
    model = SimpleNamespace(get_num_experts=lambda: experts)
    return config(lora_config=object(), model_config=model, compilation_config=SimpleNamespace(mode=mode))


def test_adapters_for_experts_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        features.settle_lora(with_adapters(8, None))
    assert str(caught.value) == (
        "--enable-lora: the CPU reference platform has no adapters for mixtures of experts; merge the adapter into the"
        " checkpoint (merge_and_unload() of PEFT) and serve that"
    )


@pytest.mark.parametrize(("mode", "warned"), [(None, False), (CompilationMode.VLLM_COMPILE, True)])
def test_adapters_switch_compilation_off(
    mode: CompilationMode | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(features.get_logger(features.__name__), "warning", warnings.append)
    asked = with_adapters(0, mode)
    features.settle_lora(asked)
    assert asked.compilation_config.mode == CompilationMode.NONE
    text = (
        "--enable-lora: adapters change from step to step, which a compiled graph cannot follow on the CPU reference"
        " platform; torch.compile is switched off"
    )
    assert warnings == [text] * warned


def test_without_adapters_compilation_is_left_alone() -> None:
    asked = config()
    features.settle_lora(asked)
    assert asked.compilation_config.mode is None


def test_a_sleeping_worker_gives_every_cache_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of layers that have several; whatever the level, the weights stay."""
    import torch

    from vllm_fl_reference import worker as module

    assert current_platform.is_sleep_mode_available()
    warnings: list[str] = []
    monkeypatch.setattr(module.get_logger(module.__name__), "warning", lambda text, *args: warnings.append(text % args))
    first, second, third = (torch.ones(4 << 20) for _ in range(3))
    worker = object.__new__(ReferenceWorker)
    worker.model_runner = SimpleNamespace(kv_caches=[first, (second[:10], third)])
    worker.sleep(level=2)
    assert warnings == ["sleep level 2: the weights stay in memory; only the KV cache is given back"]
    for cache in (first, second, third):
        assert cache[2048:-2048].count_nonzero() == 0
