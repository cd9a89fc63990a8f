"""Between text and token ids, as /tokenize, /detokenize and /v1/completions ask for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from omni_runtime.errors import InvalidRequest
from omni_runtime.models import chat as chat_module
from omni_runtime.models.chat import ChatFamily, Qwen3OmniChat, TextChat, characters_of, detokenize, tokenize
from omni_runtime.models.qwen3_omni_tiny import SPECIAL_TOKENS
from tests.unit.models.videos import a_video, noise
from tests.unit.stages.qwen3_reference import VIDEO_SIZE, tiny_model_path

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


def says_videos(*videos: np.ndarray) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "video", "data": a_video(frames)} for frames in videos]}]


@pytest.mark.parametrize("capped", [False, True])
def test_the_talker_hears_the_grid_that_the_thinker_sees(capped: bool) -> None:
    """The processor scales one frame instead of all of them, where that says the same."""
    chat = Qwen3OmniChat(tiny_model_path(), {"size": VIDEO_SIZE, "cap_pixels_per_frame": capped})
    videos = [noise(1), noise(4, 64, 16), noise(5, 100, 40)]
    built = chat.prompt(says_videos(*videos))
    whole = chat._processor(
        text=["<|video_pad|>" * 3], videos=videos, fps=2.0, size=VIDEO_SIZE, cap_pixels_per_frame=capped
    )
    assert built.row_meta["video_grid_thw"] == np.asarray(whole["video_grid_thw"]).reshape(-1).tolist()
    assert built.row_meta["video_second_per_grid"] == whole["video_second_per_grid"] == [1.0] * 3
    assert built.prompt["mm_processor_kwargs"] == {"fps": 2.0}
    assert all(np.array_equal(a, b) for a, b in zip(built.prompt["multi_modal_data"]["video"], videos, strict=True))


def test_the_videos_of_a_request_share_what_they_may_keep(
    omni_chat: Qwen3OmniChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "MAX_TAKEN_PIXELS", 5 * 32 * 48)
    omni_chat.prompt(says_videos(noise(5)))
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content\[1\]: the videos of this request have over"):
        omni_chat.prompt(says_videos(noise(3), noise(3)))


def test_how_much_text_there_is_to_read() -> None:
    """Long texts and all media are read in a thread, so that nobody else waits for them."""
    said = {"role": "user", "content": "a" * 100}
    parts = {"role": "user", "content": [{"type": "text", "text": "b" * 10}, {"type": "text", "text": "c" * 20}]}
    image = {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "image", "data": b""}]}
    bare = characters_of({"messages": [{"role": "assistant", "content": None}]})
    assert characters_of({"prompt": "e" * 7}) == 7
    assert characters_of({"messages": [said, parts]}) == 130 + 2 * bare
    assert bare > 0, "many empty messages are much to read as well"
    assert characters_of({"messages": [said, image]}) == math.inf
