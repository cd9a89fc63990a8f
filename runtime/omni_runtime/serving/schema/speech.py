"""Body of POST /v1/audio/speech, and `session.config` of its WebSocket."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from omni_runtime.serving.schema.common import MAX_TOKENS, Common, Refused, Value, VoiceName

MAX_SPEECH_CHARACTERS = 100_000  # about two hours of speech

SpeechFormat = Literal["wav", "pcm", "flac", "mp3", "opus"]
STREAMED_FORMATS = ("pcm", "wav")


class SpeechOptions(Common):
    """How to speak; `speaker` is vLLM-Omni's other name of `voice`."""

    voice: VoiceName | None = None
    response_format: SpeechFormat = "wav"
    speed: float = Field(default=1.0, ge=0.25, le=4.0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_new_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _speaker_is_voice(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("voice") is None and value.get("speaker") is not None:
            return {**value, "voice": value["speaker"]}
        return value


class SpeechRequest(SpeechOptions):
    input: str = Field(min_length=1, max_length=MAX_SPEECH_CHARACTERS)
    stream: bool = False
    stream_format: Literal["sse", "audio"] | None = None

    @field_validator("input")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is blank; send the text to speak")
        return value

    @property
    def streamed(self) -> Literal["sse", "audio"] | None:
        """How the answer is streamed; None: as one file."""
        if self.stream_format is not None:
            return self.stream_format
        return "sse" if self.stream else None

    @model_validator(mode="after")
    def _format_can_stream(self) -> SpeechRequest:
        if self.streamed is not None and self.response_format not in STREAMED_FORMATS:
            raise ValueError(
                f"response_format {self.response_format!r} cannot be streamed; use pcm or wav, or ask without stream"
            )
        return self


class SessionConfig(SpeechOptions):
    """First message of a WebSocket, and any later one between two utterances."""

    stream_audio: bool = False
    split_granularity: Literal["none", "sentence", "clause"] = "none"
    audio_encoding: Literal["binary", "base64"] = "binary"  # extension

    @model_validator(mode="after")
    def _format_can_stream(self) -> SessionConfig:
        if self.stream_audio and self.response_format != "pcm":
            raise ValueError(f"stream_audio sends pcm, not {self.response_format}; set response_format to pcm")
        return self


class InputText(Value):
    text: Annotated[str, Field(max_length=MAX_SPEECH_CHARACTERS)]


_NO_CLONING = "voices are not cloned here; use a voice of GET /v1/audio/voices"

REFUSED = (
    Refused("instructions", "the voice takes no instructions; choose another voice, or leave the field out"),
    Refused("task_type", "only CustomVoice, a voice by its name", allowed=lambda t: t == "CustomVoice"),
    Refused(
        "language", "a voice speaks its own language; leave the field out", allowed=lambda v: v in ("Auto", "auto")
    ),
    Refused("ref_audio", _NO_CLONING),
    Refused("ref_text", _NO_CLONING),
    Refused("ref_audio_2", _NO_CLONING),
    Refused("references", _NO_CLONING),
    Refused("speaker_embedding", _NO_CLONING),
    Refused("x_vector_only_mode", _NO_CLONING),
    Refused("ambient_sound", "sound effects are not made here; leave the field out"),
    Refused("duration_seconds", "the text decides the duration; leave the field out"),
    Refused("sample_rate", "audio comes at the model's own rate; leave the field out"),
    Refused("word_timestamps", "there is no aligner; leave the field out"),
)
