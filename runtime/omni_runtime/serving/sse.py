"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_runtime.errors import OmniError
from omni_runtime.serving.errors import error_body

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def named_sse(body: dict[str, Any]) -> bytes:
    """With the event's name in a line of its own, as OpenAI does where events have types."""
    return b"event: " + str(body["type"]).encode() + b"\n" + sse(body)


def sse_error(error: OmniError) -> bytes:
    return sse(error_body(error))
