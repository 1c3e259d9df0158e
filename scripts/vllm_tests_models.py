"""A cache of the model hub for vLLM's tests, in which models made here stand in for those of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steps import BootstrapError
from vllm_tests_selection import StandIn

COMMIT = "0" * 40


def make_hub(folder: Path, models: Sequence[StandIn]) -> None:
    """Fill `folder`, which is to be HF_HOME, with the models.

    Raises:
        BootstrapError: the quickstart model has not been prepared.
    """
    from vllm_fl.quickstart.model import default_directory, is_complete

    quickstart = default_directory()
    if not is_complete(quickstart):
        raise BootstrapError(f"{quickstart} does not hold the quickstart model.", "Run `vllm-fl quickstart` once.")
    for model in models:
        repository = folder / "hub" / f"models--{model.name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
        for file in quickstart.iterdir():
            if not model.config or file.name.startswith("token"):
                (snapshot / file.name).symlink_to(file)
        if model.config:
            _save(model, snapshot)


def _save(model: StandIn, folder: Path) -> None:
    import torch
    import transformers

    config = getattr(transformers, model.config)(**model.changes)
    if model.weights:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    config.save_pretrained(folder)
