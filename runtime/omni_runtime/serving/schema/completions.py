"""Body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, Tag, field_validator

from omni_runtime.serving.schema.common import (
    LOGIT_FIELDS,
    MAX_TEXT_CHARACTERS,
    MAX_TOKENS,
    ONE_CHOICE,
    TEXT_OR_LIST,
    Refused,
    Sampling,
    StreamOptions,
)

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=MAX_TOKENS)]


class CompletionRequest(Sampling):
    prompt: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS), Tag("str")]
        | Annotated[TokenIds, Tag("list[]")],
        TEXT_OR_LIST,
    ]
    max_tokens: int = Field(default=16, ge=1, le=MAX_TOKENS)
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False  # extension

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        """A list of one prompt is that prompt, as OpenAI's API takes it."""
        if not isinstance(value, list) or not value or isinstance(value[0], int):
            return value
        if len(value) > 1:
            raise ValueError("has several prompts; send one request per prompt")
        return value[0]


REFUSED = (
    ONE_CHOICE,
    Refused("best_of", "one choice per request; leave the field out", allowed=ONE_CHOICE.allowed),
    Refused("echo", "the prompt is not repeated; leave the field out"),
    Refused("suffix", "text is only continued; leave the field out"),
    *LOGIT_FIELDS,
)
