from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from vllm_fl.config import Settings, load_settings

hypothesis.settings.register_profile("steady", deadline=None)  # a busy machine is no reason to fail
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _clean(no_settings: None) -> None:
    pass


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """``load(file=..., platform=..., VLLM_FL_PREFER=...)``: settings from the texts of the layers.

    The files are my.yaml and ascend.yaml in the current directory.
    """
    monkeypatch.chdir(tmp_path)

    def load(file: str | None = None, platform: str | None = None, **environ: str) -> Settings:
        platform_file = None
        if file is not None:
            Path("my.yaml").write_text(file, encoding="utf-8")
            environ["VLLM_FL_CONFIG"] = "my.yaml"
        if platform is not None:
            platform_file = Path("ascend.yaml")
            platform_file.write_text(platform, encoding="utf-8")
        return load_settings(environ, platform_file)

    return load
