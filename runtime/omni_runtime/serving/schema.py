"""What a client may send to /v1/chat/completions: OpenAI's fields, vLLM-Omni's, and ours. Frozen values.

Fields that would change the answer but are not supported are refused by name; fields that are unknown are ignored, as
OpenAI-compatible servers do, so that newer clients keep working.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_MESSAGES = 512
MAX_PARTS = 128
MAX_TEXT_CHARACTERS = 1_000_000
MAX_TOKENS = 1_048_576


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TextPart(_Value):
    type: Literal["text"]
    text: str = Field(max_length=MAX_TEXT_CHARACTERS)


class InputAudio(_Value):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus"]


class InputAudioPart(_Value):
    type: Literal["input_audio"]
    input_audio: InputAudio


class MediaUrl(_Value):
    url: str


class ImageUrlPart(_Value):
    type: Literal["image_url"]
    image_url: MediaUrl


class AudioUrlPart(_Value):
    type: Literal["audio_url"]
    audio_url: MediaUrl


ContentPart = Annotated[TextPart | InputAudioPart | ImageUrlPart | AudioUrlPart, Field(discriminator="type")]


class ChatMessage(_Value):
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
        | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)]
        | None
    ) = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.role != "assistant" and not self.content:
            raise ValueError("is empty; give it text or content parts")
        return self


class AudioOptions(_Value):
    format: Literal["pcm16", "wav"] | None = None
    voice: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None  # R58


class StreamOptions(_Value):
    include_usage: bool = False


class ChatRequest(_Value):
    model: str | None = Field(default=None, max_length=256)
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    modalities: list[Literal["text", "audio"]] = Field(default=["text"], min_length=1, max_length=4)
    audio: AudioOptions = AudioOptions()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1, le=1_000_000)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    # Extensions
    ignore_eos: bool = False
    talker_max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    talker_temperature: float | None = Field(default=None, ge=0.0, le=2.0, allow_inf_nan=False)
    return_token_ids: bool = False
    return_codec_codes: bool = False
    timeout_seconds: float | None = Field(default=None, gt=0.0, le=86_400.0, allow_inf_nan=False)

    @field_validator("audio", "stream_options", "modalities", "stop", mode="before")
    @classmethod
    def _none_is_absent(cls, value: Any, info: Any) -> Any:
        """OpenAI's clients send null for what they do not set; `stop` may be one string."""
        if value is None:
            return cls.model_fields[info.field_name].get_default(call_default_factory=True)
        if info.field_name == "stop" and isinstance(value, str):
            return [value]
        return value

    @field_validator(
        "temperature", "top_p", "top_k", "stream", "ignore_eos", "return_token_ids", "return_codec_codes", mode="before"
    )
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @property
    def token_limit(self) -> int | None:
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits) if limits else None


def unsupported_fields(body: dict[str, Any]) -> str | None:
    """A field that asks for something else than this server does; None: none. The text names field, value and fix."""
    asked: tuple[tuple[str, bool, str], ...] = (
        ("n", body.get("n") not in (None, 1), "one choice per request; send n requests"),
        ("tools", bool(body.get("tools")), "tools are not supported; leave the field out"),
        ("functions", bool(body.get("functions")), "functions are not supported; leave the field out"),
        (
            "response_format",
            (body.get("response_format") or {"type": "text"}) != {"type": "text"},
            'only {"type": "text"} is supported',
        ),
        ("logprobs", bool(body.get("logprobs")), "log probabilities are not supported; leave the field out"),
        ("logit_bias", bool(body.get("logit_bias")), "logit_bias is not supported; leave the field out"),
        ("presence_penalty", bool(body.get("presence_penalty")), "only 0 is supported"),
        ("frequency_penalty", bool(body.get("frequency_penalty")), "only 0 is supported"),
    )
    for name, bad, fix in asked:
        if bad:
            return f"{name}: {str(body[name])[:80]!r}: not supported; {fix}"
    return None
