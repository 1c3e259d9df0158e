"""The skeleton does exactly what its README says: it can be imported, and offers no communicator."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import vllm_fl_comm


def test_declares_no_entry_point() -> None:
    assert list(importlib.metadata.distribution("vllm-fl-comm").entry_points) == []


def test_offers_nothing_but_its_version() -> None:
    assert vllm_fl_comm.__all__ == ["__version__"]
    assert vllm_fl_comm.__version__ == importlib.metadata.version("vllm-fl-comm")


def test_import_reads_no_library(tmp_path: object) -> None:
    """FLAGCX_PATH names something that would fail to load; importing does not look at it."""
    code = "import json, sys, vllm_fl_comm; print(json.dumps(sorted(sys.modules)))"
    environment = {"FLAGCX_PATH": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not {"torch", "vllm", "ctypes"} & set(json.loads(done.stdout))
