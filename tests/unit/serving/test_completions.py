"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_runtime.protocol import control
from tests.unit.orchestrator.conftest import eventually
from tests.unit.serving.conftest import Server, submit_of


async def test_openai_client_whole_and_streamed(speaking: Server) -> None:
    thinker = await speaking.replica("thinker")
    answer = await speaking.openai.completions.create(model="test-omni", prompt="Say hello", max_tokens=8, seed=4)
    assert answer.choices[0].text == "Hello world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 4)
    submit = await submit_of(thinker)
    assert submit.inputs == {"prompt": "Say hello"}
    assert (submit.params["max_tokens"], submit.params["seed"]) == (8, 4)

    stream = await speaking.openai.completions.create(
        model="test-omni", prompt=["Say hello"], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello world."
    assert [c.choices[0].finish_reason for c in chunks if c.choices].count("stop") == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_token_ids_are_a_prompt(speaking: Server) -> None:
    thinker = await speaking.replica("thinker")
    response = await speaking.http.post("/v1/completions", json={"prompt": [1, 2, 3], "return_token_ids": True})
    assert response.json()["token_ids"] == [100, 101, 102, 103]
    assert (await submit_of(thinker)).inputs == {"prompt": [1, 2, 3]}


async def test_a_model_that_needs_its_template_says_so(server: Server) -> None:
    response = await server.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 400
    for word in ("qwen3_omni_moe", "chat template", "/v1/chat/completions"):
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({}, ["prompt", "missing"], id="no prompt"),
        pytest.param({"prompt": ""}, ["prompt", "at least 1"], id="empty"),
        pytest.param({"prompt": []}, ["prompt"], id="empty list"),
        pytest.param({"prompt": ["a", "b"]}, ["prompt", "several", "one request per prompt"], id="several"),
        pytest.param({"prompt": [-1]}, ["prompt", "-1"], id="negative id"),
        pytest.param({"prompt": {"a": 1}}, ["prompt"], id="object"),
        pytest.param({"prompt": "x", "max_tokens": 0}, ["max_tokens", "0"], id="max_tokens"),
        pytest.param({"prompt": "x", "echo": True}, ["echo", "leave the field out"], id="echo"),
        pytest.param({"prompt": "x", "best_of": 3}, ["best_of", "3"], id="best_of"),
        pytest.param({"prompt": "x", "suffix": "y"}, ["suffix"], id="suffix"),
        pytest.param({"prompt": "x", "logprobs": 2}, ["logprobs"], id="logprobs"),
        pytest.param({"prompt": "x", "top_p": 0}, ["top_p", "0"], id="top_p"),
        pytest.param({"prompt": "x", "stop": [""]}, ["stop"], id="stop"),
    ],
)
async def test_bad_requests_name_field_value_and_fix(
    speaking: Server, fields: dict[str, Any], words: list[str]
) -> None:
    response = await speaking.http.post("/v1/completions", json=fields)
    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]["message"]


async def test_tokenize_asks_the_thinker(server: Server) -> None:
    """The entry has no tokenizer; the thinker answers with ids alone."""

    def translating(request: str) -> list[control.StageMessage]:
        return [
            control.StageStarted(request),
            control.ClientText(request, "", (5, 6, 7)),
            control.StageFinished(request, "stop", prompt_tokens=3),
        ]

    thinker = await server.replica("thinker", script=translating)
    response = await server.http.post("/tokenize", json={"model": "test-omni", "prompt": "abc"})
    assert response.json() == {"tokens": [5, 6, 7], "count": 3, "max_model_len": None, "token_strs": None}
    messages = [{"role": "user", "content": "hi"}]
    assert (await server.http.post("/tokenize", json={"messages": messages})).json()["count"] == 3
    first, second = (s.inputs for s in thinker.submits.values())
    assert first == {"tokenize": {"text": "abc", "add_special_tokens": True}}
    assert second == {"tokenize": {"messages": messages}}


async def test_detokenize(server: Server) -> None:
    thinker = await server.replica("thinker")
    assert (await server.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    assert (await server.http.post("/detokenize", json={"tokens": [1, 2]})).json() == {"prompt": "Hello world."}
    assert (await submit_of(thinker)).inputs == {"detokenize": [1, 2]}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/tokenize", {}, ["prompt", "messages"]),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, ["one of prompt and messages"]),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, ["return_token_strs"]),
        ("/detokenize", {}, ["tokens", "missing"]),
        ("/detokenize", {"tokens": ["x"]}, ["tokens[0]", "x"]),
        ("/detokenize", {"tokens": [-4]}, ["tokens[0]", "-4"]),
    ],
)
async def test_bad_token_requests(server: Server, path: str, fields: dict[str, Any], words: list[str]) -> None:
    response = await server.http.post(path, json=fields)
    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sent", [0, 1, 3, 5])
async def test_disconnect_aborts(speaking: Server, stream: bool, sent: int) -> None:
    """R16: after any number of outputs."""
    thinker = await speaking.replica("thinker", hold_after=sent)
    left = asyncio.Event()
    asking = asyncio.create_task(speaking.post_and_leave("/v1/completions", {"prompt": "x", "stream": stream}, left))
    await asyncio.wait_for(thinker.held.wait(), 5)
    left.set()
    await asking
    await eventually(lambda: speaking.orchestrator.unfinished == 0)
    assert speaking.bound == 0
    assert set(thinker.aborts.values()) == {"client_disconnect"}
