"""Body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from omni_runtime.serving.schema.common import (
    LOGIT_FIELDS,
    MAX_TEXT_CHARACTERS,
    MAX_TOKENS,
    NO_TOOLS,
    ONE_CHOICE,
    PLAIN_TEXT_ONLY,
    TEXT_OR_LIST,
    Refused,
    Sampling,
    StreamOptions,
    Value,
    VoiceName,
)

MAX_MESSAGES = 512
MAX_PARTS = 128

AudioFormat = Literal["pcm16", "pcm", "wav", "flac", "mp3", "opus"]
STREAMED_FORMATS = ("pcm16", "pcm", "wav")  # the others have no frame that ends where a chunk ends


class TextPart(Value):
    type: Literal["text"]
    text: str = Field(max_length=MAX_TEXT_CHARACTERS)


class InputAudio(Value):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus"]


class InputAudioPart(Value):
    type: Literal["input_audio"]
    input_audio: InputAudio


class MediaUrl(Value):
    url: str


class ImageUrlPart(Value):
    type: Literal["image_url"]
    image_url: MediaUrl


class AudioUrlPart(Value):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(Value):
    type: Literal["video_url"]
    video_url: MediaUrl


ContentPart = Annotated[
    TextPart | InputAudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart, Field(discriminator="type")
]


class ChatMessage(Value):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS), Tag("str")]
        | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("list[]")],
        TEXT_OR_LIST,
    ] = ""

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.role != "assistant" and not self.content:
            raise ValueError("is empty; give it text or content parts")
        return self


class AudioOptions(Value):
    format: AudioFormat | None = None
    voice: VoiceName | None = None


class Spoken(Sampling):
    """Fields of every surface whose answer may be text, speech or both."""

    modalities: list[Literal["text", "audio"]] = Field(default=["text"], min_length=1, max_length=4)
    audio: AudioOptions = AudioOptions()


class ChatRequest(Spoken):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    # Extensions
    talker_max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    talker_temperature: float | None = Field(default=None, ge=0.0, le=2.0, allow_inf_nan=False)
    return_token_ids: bool = False
    return_codec_codes: bool = False

    @property
    def token_limit(self) -> int | None:
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits) if limits else None


REFUSED = (
    ONE_CHOICE,
    NO_TOOLS,
    Refused("functions", "functions are not supported; leave the field out"),
    PLAIN_TEXT_ONLY,
    *LOGIT_FIELDS,
)
