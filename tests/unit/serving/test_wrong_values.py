"""A wrong value gives one error, which names the field, the value and what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from omni_runtime.errors import InvalidRequest
from omni_runtime.serving.body import parse_fields
from omni_runtime.serving.schema import chat, completions, responses, speech, tokens
from omni_runtime.serving.schema.common import Refused, Value

SAYS_HI = {"messages": [{"role": "user", "content": "hi"}]}
A_BOOLEAN = "a boolean is not a number; send a number"
NEITHER = "is neither text nor a list; send one of them"


def problem_of(fields: dict[str, Any], model: type[Value], refused: tuple[Refused, ...] = ()) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_fields(fields, model, refused)
    return str(caught.value)


@pytest.mark.parametrize(
    "field",
    [
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "timeout_seconds",
        "talker_max_tokens",
        "talker_temperature",
    ],
)
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_not_a_number_of_a_chat(field: str, value: bool) -> None:
    assert problem_of({**SAYS_HI, field: value}, chat.ChatRequest, chat.REFUSED) == f"{field}: '{value}': {A_BOOLEAN}"


@pytest.mark.parametrize(
    ("fields", "model", "refused", "says"),
    [
        ({"prompt": "a", "max_tokens": True}, completions.CompletionRequest, completions.REFUSED, "max_tokens: 'True'"),
        ({"prompt": [True, 1]}, completions.CompletionRequest, completions.REFUSED, "prompt: 'list'"),
        ({"prompt": [[1, True]]}, completions.CompletionRequest, completions.REFUSED, "prompt: 'list'"),
        ({"prompt": "a", "best_of": True}, completions.CompletionRequest, completions.REFUSED, "best_of: 'True'"),
        ({**SAYS_HI, "n": True}, chat.ChatRequest, chat.REFUSED, "n: 'True'"),
        ({**SAYS_HI, "presence_penalty": False}, chat.ChatRequest, chat.REFUSED, "presence_penalty: 'False'"),
        ({"input": "a", "max_output_tokens": True}, responses.ResponseRequest, (), "max_output_tokens: 'True'"),
        ({"input": "a", "speed": True}, speech.SpeechRequest, (), "speed: 'True'"),
        ({"seed": True}, speech.SessionConfig, (), "seed: 'True'"),
        ({"tokens": [1, False]}, tokens.DetokenizeRequest, (), "tokens: 'list'"),
    ],
)
def test_a_boolean_is_not_a_number_elsewhere(
    fields: dict[str, Any], model: type[Value], refused: tuple[Refused, ...], says: str
) -> None:
    assert problem_of(fields, model, refused).startswith(f"{says}: ")


def test_booleans_stay_where_they_belong() -> None:
    asked = parse_fields({**SAYS_HI, "stream": True, "ignore_eos": False, "n": 1}, chat.ChatRequest, chat.REFUSED)
    assert asked.stream is True


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (5, f"messages[0].content: '5': {NEITHER}"),
        (True, f"messages[0].content: 'True': {NEITHER}"),
        ({"type": "text", "text": "hi"}, f"messages[0].content: 'dict': {NEITHER}"),
        (["hi"], "messages[0].content[0]: 'hi': not an object; send a JSON object"),
        ([{"text": "hi"}], "messages[0].content[0].type: is missing; send an object that says what it is"),
        (
            [{"type": "picture"}],
            (
                "messages[0].content[0].type: 'picture': unknown type; use 'text', 'input_audio', 'image_url', 'audio_url', "
                "'video_url'"
            ),
        ),
        ([{"type": "text"}], "messages[0].content[0].text: 'dict': is missing; add it"),
        (
            [{"type": "text", "text": "hi"}, {"type": "text", "text": 5}],
            "messages[0].content[1].text: '5': invalid value; input should be a valid string",
        ),
        (
            [{"type": "image_url", "image_url": "http://a"}],
            "messages[0].content[0].image_url: 'http://a': not an object; send a JSON object",
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "", "format": "aiff"}}],
            (
                "messages[0].content[0].input_audio.format: 'aiff': invalid value; "
                "input should be 'wav', 'mp3', 'flac', 'ogg' or 'opus'"
            ),
        ),
    ],
)
def test_one_error_for_one_wrong_part(content: Any, says: str) -> None:
    assert problem_of({"messages": [{"role": "user", "content": content}]}, chat.ChatRequest) == says


@pytest.mark.parametrize(
    ("fields", "model", "says"),
    [
        ({"prompt": 5}, completions.CompletionRequest, f"prompt: '5': {NEITHER}"),
        ({"prompt": True}, completions.CompletionRequest, f"prompt: 'True': {NEITHER}"),
        ({"prompt": {"text": "a"}}, completions.CompletionRequest, f"prompt: 'dict': {NEITHER}"),
        (
            {"prompt": [1, "a"]},
            completions.CompletionRequest,
            "prompt[1]: 'a': invalid value; input should be a valid integer, unable to parse string as an integer",
        ),
        ({"input": 5}, responses.ResponseRequest, f"input: '5': {NEITHER}"),
        ({"input": [5]}, responses.ResponseRequest, "input[0]: '5': not an object; send a JSON object"),
        ({"input": [{"role": "user", "content": 5}]}, responses.ResponseRequest, f"input[0].content: '5': {NEITHER}"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            responses.ResponseRequest,
            "input[0].content[0].text: 'dict': is missing; add it",
        ),
    ],
)
def test_one_error_for_one_wrong_prompt(fields: dict[str, Any], model: type[Value], says: str) -> None:
    assert problem_of(fields, model) == says
