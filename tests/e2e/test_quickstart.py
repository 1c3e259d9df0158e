"""The quickstart as a user runs it: the real model, the real engine, the real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = [sys.executable, "-m", "vllm_fl", "quickstart"]
LAYERS = 30
#: Operators of a dense Llama that are called while it answers.
CALLED = {"compute_slot_mapping", "reshape_and_cache", "rms_norm", "rotary_embedding", "silu_and_mul"}


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """The environment without a developer's settings of vLLM and vllm-fl; the user's cache has the model."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FLAGGEMS_", "USE_FL"))}


@pytest.mark.timeout(600)
def test_quickstart_answers_and_counts(settings: dict[str, str]) -> None:
    done = subprocess.run([*QUICKSTART, "--json"], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["platform"] == "reference"
    assert report["dtype"] == "bfloat16"
    first = report["answers"][0]
    assert first["prompt"] == "What is the name of the capital of France?"
    assert "Paris" in first["text"]
    assert len(report["answers"]) == 3
    assert all(answer["text"] for answer in report["answers"])
    served_by = {use["operator"]: use["implementation"] for use in report["operators"]}
    assert [served_by[operator] for operator in sorted(CALLED)] == ["reference.torch"] * len(CALLED)
    assert {use["kind"] for use in report["operators"]} == {"reference"}
    calls = {use["operator"]: use["calls"] for use in report["operators"]}
    assert calls.keys() >= CALLED
    steps = calls["compute_slot_mapping"]
    assert steps == max(answer["tokens"] for answer in report["answers"]), "a step gives each chat one token"
    assert calls["silu_and_mul"] == calls["rotary_embedding"] == LAYERS * steps
    assert calls["rms_norm"] == (2 * LAYERS + 1) * steps


@pytest.mark.timeout(600)
def test_quickstart_serves(settings: dict[str, str], tmp_path: Path) -> None:
    """The printed curl line works, and Ctrl-C ends the server and all that it started."""
    command = [*QUICKSTART, "--serve"]
    with subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as quickstart:
        try:
            assert quickstart.stdout is not None
            shown = ""
            for line in quickstart.stdout:
                shown += line
                if line.startswith("Ctrl-C"):
                    break
            curl = next((line for line in shown.splitlines() if line.startswith("curl ")), "")
            assert curl, quickstart.communicate()[1]
            answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout
            message = json.loads(answer)["choices"][0]["message"]
            assert message["role"] == "assistant"
            assert "Paris" in message["content"]
            port = re.findall(r"127\.0\.0\.1:(\d+)/", curl)[0]
            assert processes_with(f"--port\0{port}")
        finally:
            quickstart.send_signal(signal.SIGINT)
            errors = quickstart.communicate(timeout=60)[1]
    assert quickstart.returncode == 0, errors
    assert "Traceback" not in errors
    assert processes_with(f"--port\0{port}") == []


def processes_with(words: str) -> list[int]:
    """Processes of this machine whose command line has `words`, separated by zero bytes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if words.encode() in line:
                found.append(int(entry.name))
    return found
