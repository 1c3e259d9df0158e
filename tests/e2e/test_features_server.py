"""Features of ``vllm serve`` on the CPU platform, with SmolLM2, which says something. One server; order matters.

The marks are those of test_features.py.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import NAME, Server, served

from vllm_fl.quickstart.model import prepare_model

pytestmark = pytest.mark.more

QUESTION = [{"role": "user", "content": "Tell me about a city in France, its country and how many people live there."}]
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "country", "inhabitants", "rivers"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
#: What a model that was trained for the parser `hermes` writes; SmolLM2 was not, so it is led there.
HERMES = (
    r"<tool_call>\n\{\"name\": \"get_weather\", \"arguments\": \{\"city\": \"[A-Z][a-z]{3,8}\","
    r" \"unit\": \"celsius\"\}\}\n</tool_call>"
)


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # In float32 a token does not depend on how the prompt was cut, and so on what is in the cache.
    options = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8"]
    # A small model may go on with white space for ever, where a schema allows it.
    options += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--enable-sleep-mode", "--shutdown-timeout", "120"]
    # Sleep and pause are only offered in this mode.
    environment = {**environment, "VLLM_SERVER_DEV_MODE": "1"}
    with served(prepare_model(), environment, tmp_path_factory.mktemp("serve") / "log", *options) as running:
        yield running


def chat(server: Server, **body: Any) -> Any:
    """The first choice."""
    answer = server.post("chat/completions", **{"messages": QUESTION, "max_tokens": 200, **body})
    return answer["choices"][0]


@pytest.mark.feature("Structured output")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_json_schema(stream: bool, server: Server) -> None:
    """The answer is JSON, and fits the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    body = {"messages": QUESTION, "max_tokens": 200, "response_format": form}
    if stream:
        parts = server.post("chat/completions", **body, stream=True)
        text = "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])
    else:
        text = chat(server, **body)["message"]["content"]
    jsonschema.validate(json.loads(text), CITY)


@pytest.mark.feature("Structured output")
@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,9} has \d{3,7} inhabitants"}, r"[A-Z][a-z]{2,9} has \d{3,7} inhabitants"),
        ({"choice": ["Lyon", "Marseille"]}, "Lyon|Marseille"),
        ({"grammar": 'root ::= "city: " name\nname ::= [A-Z] [a-z] [a-z] [a-z]'}, "city: [A-Z][a-z]{3}"),
    ],
    ids=["expression", "choice", "grammar"],
)
def test_expressions_choices_grammars(rule: dict[str, Any], pattern: str, server: Server) -> None:
    """The whole answer is what the rule allows."""
    text = chat(server, structured_outputs=rule)["message"]["content"]
    assert re.fullmatch(pattern, text)


@pytest.mark.feature("Tool calls in chat")
@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "get_weather"}}, "required"], ids=["named", "required"]
)
def test_a_tool_that_must_be_called(choice: Any, server: Server) -> None:
    """The call names the tool, and its arguments fit the tool's schema."""
    (call,) = chat(server, tools=TOOLS, tool_choice=choice)["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["parameters"])


@pytest.mark.feature("Tool calls in chat")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_that_may_be_called(stream: bool, server: Server) -> None:
    """The call is found in what the model writes."""
    body = {"messages": QUESTION, "max_tokens": 200, "tools": TOOLS, "structured_outputs": {"regex": HERMES}}
    if stream:
        parts = server.post("chat/completions", **body, stream=True)
        deltas = [choice["delta"] for part in parts for choice in part["choices"]]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        name, arguments = ("".join(call.get(key) or "" for call in calls) for key in ("name", "arguments"))
        assert len(calls) > 1
    else:
        message = chat(server, **body)["message"]
        (call,) = message["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert not message["content"]
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), WEATHER["parameters"])


@pytest.mark.feature("Streaming")
def test_streaming(server: Server) -> None:
    """A chat comes token by token; the parts are the answer, and the last one counts the same tokens."""
    whole = server.post("chat/completions", messages=QUESTION, max_tokens=24)
    parts = server.post(
        "chat/completions", messages=QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    texts = [choice["delta"].get("content") or "" for part in parts for choice in part["choices"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert sum(map(bool, texts)) > 12
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert parts[-1]["usage"][count] == whole["usage"][count]


def metrics(server: Server) -> dict[str, float]:
    """Sums by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("metrics")):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.feature("Metrics endpoint")
def test_metrics(server: Server) -> None:
    """Requests and tokens grow by what was used."""
    before = metrics(server)
    used = [server.post("completions", prompt="The capital of France is", max_tokens=n)["usage"] for n in (3, 9)]
    after = metrics(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:request_success_total"] == 2
    assert grown["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in used)
    assert grown["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in used)
    assert grown["vllm:time_to_first_token_seconds_count"] == 2


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within half a minute."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.feature("Pause, sleep, wake up")
def test_pause_keeps_a_running_request(server: Server) -> None:
    """The answer of a request that was paused and resumed is the one that it would have been."""
    body = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
    expected = server.post("completions", **body)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("completions", **body)))
    thread.start()
    assert eventually(lambda: metrics(server)["vllm:num_requests_running"] == 1)
    server.command("pause?mode=keep")
    assert json.loads(server.get("is_paused")) == {"is_paused": True}
    assert thread.is_alive()
    server.command("resume")
    thread.join(120)
    assert answers[0]["choices"][0]["text"] == expected["choices"][0]["text"]


@pytest.mark.feature("Pause, sleep, wake up")
def test_sleep_and_wake_up(server: Server) -> None:
    """The server says that it sleeps, and answers as before when it is awake."""
    before = chat(server, max_tokens=12)["message"]
    server.command("sleep?level=1")
    assert json.loads(server.get("is_sleeping")) == {"is_sleeping": True}
    server.command("wake_up")
    assert json.loads(server.get("is_sleeping")) == {"is_sleeping": False}
    assert chat(server, max_tokens=12)["message"] == before


@contextmanager
def started(server: Server, tokens: int) -> Iterator[Any]:
    """The response to a request for so many tokens, of which the first has come."""
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.readline().startswith(b"data: {")
        yield response


@pytest.mark.feature("Requests that the client gives up")
def test_a_client_that_leaves(server: Server) -> None:
    """The request ends on the server, too."""
    before = metrics(server)["vllm:generation_tokens_total"]
    with started(server, tokens=900):
        assert eventually(lambda: metrics(server)["vllm:num_requests_running"] == 1)
    assert eventually(lambda: metrics(server)["vllm:num_requests_running"] == 0)
    assert metrics(server)["vllm:generation_tokens_total"] - before < 900


@pytest.mark.feature("Graceful shutdown")
def test_shutdown_during_a_request(server: Server) -> None:
    """With `--shutdown-timeout`: a request that runs is answered, then the server ends with code 0; no process is left.

    The last test of the server.
    """
    assert len(server.processes()) >= 2
    with started(server, tokens=24) as response:
        server.process.send_signal(signal.SIGTERM)
        lines = [line for line in response if line.strip()]
    assert lines[-1].strip() == b"data: [DONE]"
    assert json.loads(lines[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    server.wait_for_end()
