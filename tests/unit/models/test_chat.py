"""Between text and token ids, as /tokenize, /detokenize and /v1/completions ask for it."""

from __future__ import annotations

import pytest

from omni_runtime.errors import InvalidRequest
from omni_runtime.models.chat import ChatFamily, Qwen3OmniChat, TextChat, detokenize, tokenize
from omni_runtime.models.qwen3_omni_tiny import SPECIAL_TOKENS
from tests.unit.stages.qwen3_reference import tiny_model_path

TEXT = "Grüße, 3.14 and more"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def text_chat() -> TextChat:
    return TextChat(tiny_model_path())


@pytest.fixture(scope="module")
def omni_chat() -> Qwen3OmniChat:
    return Qwen3OmniChat(tiny_model_path())


@pytest.mark.parametrize("family", ["text_chat", "omni_chat"])
def test_there_and_back(family: str, request: pytest.FixtureRequest) -> None:
    chat: ChatFamily = request.getfixturevalue(family)
    ids = tokenize(chat, {"text": TEXT, "add_special_tokens": True})
    assert len(ids) > 5
    assert detokenize(chat, ids) == TEXT
    assert tokenize(chat, {"text": "", "add_special_tokens": False}) == []


@pytest.mark.parametrize("family", ["text_chat", "omni_chat"])
def test_messages_go_through_the_template(family: str, request: pytest.FixtureRequest) -> None:
    chat: ChatFamily = request.getfixturevalue(family)
    ids = tokenize(chat, {"messages": MESSAGES})
    start, end = SPECIAL_TOKENS["<|im_start|>"], SPECIAL_TOKENS["<|im_end|>"]
    assert [i for i in ids if i in (start, end)] == [start, end, start]
    assert "hi" in detokenize(chat, ids)


@pytest.mark.parametrize("wrong", [-1, 1 << 20])
def test_an_id_beyond_the_vocabulary_is_named(text_chat: TextChat, wrong: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"token 1: {wrong}: the vocabulary has ids 0 to"):
        detokenize(text_chat, [5, wrong])
    with pytest.raises(InvalidRequest, match="token 0"):
        text_chat.completion([wrong])


def test_a_prompt_is_its_ids(text_chat: TextChat) -> None:
    ids = tokenize(text_chat, {"text": TEXT, "add_special_tokens": True})
    assert text_chat.completion(TEXT).prompt == text_chat.completion(ids).prompt == {"prompt_token_ids": ids}
    with pytest.raises(InvalidRequest, match="no tokens"):
        text_chat.completion([])


def test_qwen3_omni_needs_its_template(omni_chat: Qwen3OmniChat) -> None:
    with pytest.raises(InvalidRequest, match="/v1/chat/completions"):
        omni_chat.completion(TEXT)
