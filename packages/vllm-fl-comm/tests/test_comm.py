"""The distribution declares its communicator in plain data; importing it loads neither torch nor FlagCX."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import vllm_fl_comm
from vllm_fl.plugins import CommunicatorPlugin


def test_declares_the_communicator() -> None:
    (point,) = importlib.metadata.distribution("vllm-fl-comm").entry_points
    assert (point.group, point.name) == ("vllm_fl.communicators", "flagcx")
    plugin = point.load()
    assert isinstance(plugin, CommunicatorPlugin)
    assert plugin.variables == ("FLAGCX_PATH",)


def test_offers_nothing_but_its_version_at_the_top() -> None:
    assert vllm_fl_comm.__all__ == ["__version__"]
    assert vllm_fl_comm.__version__ == importlib.metadata.version("vllm-fl-comm")


def test_import_reads_no_library(tmp_path: Path) -> None:
    """FLAGCX_PATH names something that would fail to load; neither the plug-in nor the binding looks at it yet."""
    code = (
        "import json, sys, vllm_fl_comm.plugin, vllm_fl_comm.status, vllm_fl_comm.flagcx;"
        " print(json.dumps(sorted(sys.modules)))"
    )
    environment = {"FLAGCX_PATH": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not {"torch", "vllm"} & set(json.loads(done.stdout))
