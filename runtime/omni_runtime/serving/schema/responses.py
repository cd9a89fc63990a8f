"""Body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from omni_runtime.serving.schema.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatMessage,
    ContentPart,
    ImageUrlPart,
    InputAudio,
    InputAudioPart,
    MediaUrl,
    Spoken,
    TextPart,
)
from omni_runtime.serving.schema.common import (
    MAX_TEXT_CHARACTERS,
    MAX_TOKENS,
    NO_TOOLS,
    TEXT_OR_LIST,
    Refused,
    Value,
)


class InputText(Value):
    type: Literal["input_text", "output_text"]
    text: str = Field(max_length=MAX_TEXT_CHARACTERS)

    def as_part(self) -> ContentPart:
        return TextPart(type="text", text=self.text)


class InputImage(Value):
    type: Literal["input_image"]
    image_url: str

    def as_part(self) -> ContentPart:
        return ImageUrlPart(type="image_url", image_url=MediaUrl(url=self.image_url))


class InputSound(Value):
    type: Literal["input_audio"]
    input_audio: InputAudio

    def as_part(self) -> ContentPart:
        return InputAudioPart(type="input_audio", input_audio=self.input_audio)


InputPart = Annotated[InputText | InputImage | InputSound, Field(discriminator="type")]


class InputMessage(Value):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS), Tag("str")]
        | Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS), Tag("list[]")],
        TEXT_OR_LIST,
    ]

    def as_message(self) -> ChatMessage:
        content = self.content if isinstance(self.content, str) else [part.as_part() for part in self.content]
        return ChatMessage(role=self.role, content=content)


class ResponseRequest(Spoken):
    """`modalities` and `audio` are an extension."""

    input: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS), Tag("str")]
        | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES), Tag("list[]")],
        TEXT_OR_LIST,
    ]
    instructions: str | None = Field(default=None, max_length=MAX_TEXT_CHARACTERS)
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)

    @property
    def messages(self) -> list[ChatMessage]:
        """Without the instructions, so that errors count as the client does."""
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)]
        return [message.as_message() for message in self.input]


def _plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") in (None, {"type": "text"})


_NOT_STORED = "responses are not stored; send the whole conversation in input"

REFUSED = (
    NO_TOOLS,
    Refused("previous_response_id", _NOT_STORED),
    Refused("conversation", _NOT_STORED),
    Refused("background", "a response is given at once or streamed; leave the field out"),
    Refused("prompt", "prompt templates are not stored here; send the text in input"),
    Refused("text", 'only the format {"type": "text"} is supported', allowed=_plain_text),
    Refused("top_logprobs", "log probabilities are not supported; leave the field out"),
)
