"""Fixtures of the end-to-end tests: a clean environment, fresh processes in it, a tiny model."""

from __future__ import annotations

import inspect
import os

import pytest
from e2e_support import HERE, Fresh, TinyModel, save_byte_tokenizer

#: Everything that a process inherits from the environment of the tests; the rest might be a developer's setting.
INHERITED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "OMP_NUM_THREADS",
    "CXX",
    "CPATH",
    "LIBRARY_PATH",
    "PYTHONPATH",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine's start takes ten times as long where other work shares the two cores."""
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))
        for mark in item.iter_markers("feature"):  # into the JUnit file, for scripts/features.py
            about = inspect.cleandoc(item.function.__doc__).partition("\n")[0]
            item.user_properties += [("feature", mark.args[0]), ("checked", about)]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A clean environment: a home and caches of this session, no network, no usage report."""
    home = tmp_path_factory.mktemp("home")
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {
        **inherited,
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture(scope="session")
def fresh(environment: dict[str, str]) -> Fresh:
    return Fresh(environment)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(path)
    save_byte_tokenizer(path)
    return TinyModel(path, model)
