"""The arguments of an engine, as `vllm serve` would understand them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_fl.engines import engine_arguments
from vllm_fl.errors import CommandError, Exit


def test_only_what_is_given(tmp_path: Path) -> None:
    found = engine_arguments(str(tmp_path), ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager"])
    assert found == {"model": str(tmp_path), "dtype": "float32", "max_model_len": 128, "enforce_eager": True}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--bogus", "1"], "unrecognized arguments: --bogus 1"),
        (["--max-model-len", "long"], "argument --max-model-len: "),
        (["--dtype", "float33"], "argument --dtype: invalid choice: 'float33'"),
    ],
)
def test_what_vllm_does_not_take(extra: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        engine_arguments(str(tmp_path), extra)
    assert caught.value.code == Exit.USAGE
    assert caught.value.message.startswith(f"vLLM does not take these arguments: {message}")
    assert caught.value.remedy == "What follows the model is vLLM's; `vllm serve --help=all` lists it."
