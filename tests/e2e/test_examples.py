"""The examples run as they stand in the repository."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """The environment of a user who has activated this one; without a developer's settings of vLLM and vllm-fl."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FLAGGEMS_", "USE_FL"))}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.more
@pytest.mark.timeout(600)
def test_offline_inference(settings: dict[str, str]) -> None:
    command = [sys.executable, str(EXAMPLES / "offline_inference.py"), "--max-tokens", "16"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = re.findall(r"^Prompt: (.*)\nAnswer: (.+)", done.stdout, re.MULTILINE)
    assert len(answers) == 3
    assert answers[0][0] == "What is the name of the capital of France?"
    assert "Paris" in answers[0][1]


@pytest.mark.timeout(600)
def test_serve(settings: dict[str, str], tmp_path: Path) -> None:
    """Every block of serve.md, in order, in one shell; only the port is another one."""
    blocks = BLOCK.findall((EXAMPLES / "serve.md").read_text(encoding="utf-8"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert blocks[0].startswith("PORT=8000\n")
    blocks[0] = blocks[0].replace("PORT=8000", f"PORT={port}")
    marker = "---- end of a block ----"
    script = "set -e\n" + f"\necho; echo '{marker}'\n".join(blocks)
    shell = subprocess.Popen(
        ["bash", "-c", script], env=settings, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        shown, errors = shell.communicate(timeout=550)
    finally:
        with contextlib.suppress(ProcessLookupError):  # where a block failed, the server must not stay
            os.killpg(shell.pid, signal.SIGKILL)
    log = tmp_path / "vllm-serve.log"
    assert shell.returncode == 0, shown + errors + (log.read_text() if log.exists() else "")
    _start, _wait, chat, stream, _stop = (part.strip() for part in shown.split(marker))
    assert "Paris" in json.loads(chat)["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert len(deltas) > 3
    assert "".join(delta.get("content") or "" for delta in deltas).strip()
    served = log.read_text().partition("[shutdown]")[0]  # vLLM 0.28 reports its own shutdown as an error
    assert "Traceback" not in served
