"""``vllm serve`` through our platform: the OpenAI API, streaming, many requests at once, its start and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_support import TinyModel, run_group

CLI = (sys.executable, "-m", "vllm.entrypoints.cli.main")
NEW_TOKENS = 8
#: Of lengths 3 to 65, all different.
PROMPTS = [[(11 * i + 7 * j) % 280 + 5 for j in range(3 + 2 * i)] for i in range(32)]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: Path
    marker: str

    def post(self, path: str, **body: Any) -> Any:
        """The answer, or the list of the streamed answers."""
        body = {"model": self.model, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **body}
        request = urllib.request.Request(
            f"{self.url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            if not body.get("stream"):
                return json.load(response)
            lines = [line.decode().strip().removeprefix("data: ") for line in response if line.strip()]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()}")

    def processes(self) -> list[int]:
        """Processes that have inherited the server's environment, wherever they may have gone."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                alive = "\nState:\tZ" not in (entry / "status").read_text()
                if alive and self.marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(
    tiny_llama: TinyModel, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    port, marker = free_port(), f"FL_TEST_SERVER={uuid.uuid4()}"
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [*CLI, "serve", str(tiny_llama.path), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, **dict([marker.split("=")])},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Server(process, f"http://127.0.0.1:{port}", "tiny", log, marker)
    try:
        running.wait_until_ready(timeout=600)
        yield running
    finally:
        for pid in running.processes():
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_completions(server: Server, tiny_llama: TinyModel) -> None:
    answer = server.post("completions", prompt=PROMPTS[3], return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == tiny_llama.greedy([PROMPTS[3]], NEW_TOKENS)[0]
    assert answer["usage"]["prompt_tokens"] == len(PROMPTS[3])
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS


def test_thirty_two_requests_at_once(server: Server, tiny_llama: TinyModel) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda p: server.post("completions", prompt=p, return_token_ids=True), PROMPTS))
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert tokens == tiny_llama.greedy(PROMPTS, NEW_TOKENS)


def test_streamed_completions(server: Server, tiny_llama: TinyModel) -> None:
    parts = server.post("completions", prompt=PROMPTS[5], return_token_ids=True, stream=True)
    tokens = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids") or ()]
    assert tokens == tiny_llama.greedy([PROMPTS[5]], NEW_TOKENS)[0]
    assert len(parts) > 1
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


def test_chat(server: Server, tiny_llama: TinyModel) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = AutoTokenizer.from_pretrained(tiny_llama.path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    answer = server.post("chat/completions", messages=messages, return_token_ids=True)
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == tiny_llama.greedy([prompt], NEW_TOKENS)[0]
    parts = server.post("chat/completions", messages=messages, stream=True)
    text = "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])
    assert text == answer["choices"][0]["message"]["content"]


def test_it_ends_cleanly(server: Server) -> None:
    """The last test of the server: SIGTERM ends it, and no process of it is left."""
    assert len(server.processes()) >= 2
    assert "Traceback" not in server.log.read_text()  # from here on vLLM 0.28 reports its own shutdown as an error
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log.read_text()
    deadline = time.monotonic() + 10
    while server.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.processes() == []
    assert "Unknown vLLM environment variable detected: VLLM_FL" not in server.log.read_text()


def test_a_wrong_setting_stops_it_with_our_message(tiny_llama: TinyModel, environment: dict[str, str]) -> None:
    command = [*CLI, "serve", str(tiny_llama.path), "--port", str(free_port())]
    returncode, log = run_group(command, {**environment, "VLLM_FL_PREFER": "flaggems"}, timeout=600)
    message = (
        "environment variable VLLM_FL_PREFER: 'flaggems' is not one of flagos, vendor, reference;"
        " did you mean 'flagos'?"
    )
    assert returncode == 1
    assert log.rstrip().splitlines()[-1] == f"vllm_fl.config.problems.ConfigProblems: {message}"
    assert log.count(message) == 2  # logged where it was found, raised where vLLM stops for it
    assert log.count("Traceback") == 1
