"""Wire form of a chat completion: streamed chunks and the whole answer. Pure builders.

A streamed chunk has the top-level field `modality`; audio is base64 in `delta.content`, as vLLM-Omni's clients read it.
`finish_reason` stands once per choice, in the last chunk.
"""

from __future__ import annotations

import base64
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from omni_runtime.serving.collect import Collected

AUDIO_EXPIRES_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Completion:
    """Id, time and model of one answer; every chunk repeats them."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(
        self, delta: dict[str, Any], modality: str, finish_reason: str | None = None, **extra: Any
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
            "modality": modality,
            **extra,
        }

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [],
            "usage": usage,
        }

    def whole(
        self, collected: Collected, *, text: bool, audio: bytes | None, extensions: dict[str, Any]
    ) -> dict[str, Any]:
        """One choice that holds both text and audio (R53). audio: the encoded file, None: not asked for."""
        spoken = "".join(collected.text)
        message: dict[str, Any] = {"role": "assistant", "content": spoken if text else None, "refusal": None}
        if audio is not None:
            message["audio"] = {
                "id": f"audio_{self.id.removeprefix('chatcmpl-')}",
                "data": base64.b64encode(audio).decode("ascii"),
                "transcript": spoken,
                "expires_at": self.created + AUDIO_EXPIRES_SECONDS,
                "sample_rate": collected.sample_rate,
            }
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": collected.finish_reason}],
            "usage": collected.usage(),
            **extensions,
        }
