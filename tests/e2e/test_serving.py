"""``vllm serve`` through our platform: the OpenAI API, streaming, many requests at once, its start and its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from e2e_support import TinyModel, run_group
from server_support import CLI, Server, free_port, served

NEW_TOKENS = 8
#: Of lengths 3 to 65, all different.
PROMPTS = [[(11 * i + 7 * j) % 280 + 5 for j in range(3 + 2 * i)] for i in range(32)]


@pytest.fixture(scope="module")
def server(
    tiny_llama: TinyModel, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with served(tiny_llama.path, environment, log, "--dtype", "float32", "--enforce-eager") as running:
        yield running


@pytest.fixture
def post(server: Server) -> Any:
    """Posts a request for NEW_TOKENS tokens."""
    return partial(server.post, max_tokens=NEW_TOKENS, ignore_eos=True)


def test_completions(post: Any, tiny_llama: TinyModel) -> None:
    answer = post("completions", prompt=PROMPTS[3], return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == tiny_llama.greedy([PROMPTS[3]], NEW_TOKENS)[0]
    assert answer["usage"]["prompt_tokens"] == len(PROMPTS[3])
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS


def test_thirty_two_requests_at_once(post: Any, tiny_llama: TinyModel) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda p: post("completions", prompt=p, return_token_ids=True), PROMPTS))
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert tokens == tiny_llama.greedy(PROMPTS, NEW_TOKENS)


def test_streamed_completions(post: Any, tiny_llama: TinyModel) -> None:
    parts = post("completions", prompt=PROMPTS[5], return_token_ids=True, stream=True)
    tokens = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids") or ()]
    assert tokens == tiny_llama.greedy([PROMPTS[5]], NEW_TOKENS)[0]
    assert len(parts) > 1
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


def test_chat(post: Any, tiny_llama: TinyModel) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = AutoTokenizer.from_pretrained(tiny_llama.path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    answer = post("chat/completions", messages=messages, return_token_ids=True)
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == tiny_llama.greedy([prompt], NEW_TOKENS)[0]
    parts = post("chat/completions", messages=messages, stream=True)
    text = "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])
    assert text == answer["choices"][0]["message"]["content"]


def test_it_ends_cleanly(server: Server) -> None:
    """The last test of the server: SIGTERM ends it, and no process of it is left."""
    assert len(server.processes()) >= 2
    assert "Traceback" not in server.log.read_text()  # from here on vLLM 0.28 reports its own shutdown as an error
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_end()
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
