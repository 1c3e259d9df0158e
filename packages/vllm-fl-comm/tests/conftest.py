"""The simulated FlagCX, built once a session in each form, and an environment without settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from comm_support import Doubles, fault

from vllm_fl.config import reset_settings
from vllm_fl.plugins import reset_plugins
from vllm_fl_comm import flagcx
from vllm_fl_comm.flagcx import Library


@pytest.fixture(scope="session")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doubles]:
    yield Doubles(tmp_path_factory.mktemp("doubles"))
    # A process that ends while it connects leaves its memory behind.
    for file in Path("/dev/shm").glob("flagcx-double-*"):
        if not Path("/proc", file.name.split("-")[2]).exists():
            file.unlink(missing_ok=True)


@pytest.fixture
def library(doubles: Doubles) -> Iterator[Library]:
    library = doubles.library()
    yield library
    fault(library, "")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the developer, and nothing that an earlier test loaded."""
    for name in list(os.environ):
        if name.startswith(("VLLM_FL_", "FLAGCX_", "NCCL_")):
            monkeypatch.delenv(name)
    for forget in (flagcx.forget, reset_settings, reset_plugins):
        forget()
    yield
    for forget in (flagcx.forget, reset_settings, reset_plugins):
        forget()
