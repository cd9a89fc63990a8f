"""Bodies of POST /tokenize and /detokenize, as vLLM's server takes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from omni_runtime.serving.schema.chat import MAX_MESSAGES, ChatMessage
from omni_runtime.serving.schema.common import MAX_TEXT_CHARACTERS, MAX_TOKENS, Common, Refused


class TokenizeRequest(Common):
    """Either a prompt, or messages that go through the chat template."""

    prompt: str | None = Field(default=None, max_length=MAX_TEXT_CHARACTERS)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("has not one of prompt and messages; send prompt or messages")
        return self


class DetokenizeRequest(Common):
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKENS)]


REFUSED = (
    Refused("return_token_strs", "token strings are not given; leave the field out"),
    Refused("add_generation_prompt", "the template always opens the answer; leave it out", allowed=lambda v: v is True),
    Refused("continue_final_message", "the template always opens a new turn; leave the field out"),
    Refused("tools", "tools are not supported; leave the field out"),
)
