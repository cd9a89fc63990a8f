"""Wire form of /v1/responses: the response object, and the events of a stream. Pure builders."""

from __future__ import annotations

import base64
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from omni_runtime.errors import OmniError
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.schema.responses import ResponseRequest


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """One response in every state of its life."""

    request: ResponseRequest
    model: str
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def in_progress(self) -> dict[str, Any]:
        return self._response("in_progress", [])

    def ended(self, collected: Collected, content: list[dict[str, Any]]) -> dict[str, Any]:
        status = status_of(collected)
        return self._response(
            status,
            [self.item(status, content)],
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=_usage(collected),
        )

    def failed(self, error: OmniError) -> dict[str, Any]:
        return self._response("failed", [], error={"code": error.code, "message": str(error)})

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def status_of(collected: Collected) -> str:
    return "incomplete" if collected.finish_reason == "length" else "completed"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def audio_part(audio: bytes, transcript: str, collected: Collected) -> dict[str, Any]:
    return {
        "type": "output_audio",
        "data": base64.b64encode(audio).decode("ascii"),
        "transcript": transcript,
        "sample_rate": collected.sample_rate,
    }


def _usage(collected: Collected) -> dict[str, Any]:
    usage = collected.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "audio_seconds": usage["audio_seconds"],
    }


class Events:
    """Numbers the events of one stream; text is part 0 of the one item."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = -1

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def opening(self) -> list[dict[str, Any]]:
        response = self._response.in_progress()
        item = self._response.item("in_progress", [])
        return [
            self.event("response.created", response=response),
            self.event("response.in_progress", response=response),
            self.event("response.output_item.added", output_index=0, item=item),
        ]

    def text_opening(self) -> dict[str, Any]:
        return self.event("response.content_part.added", **self._part(), part=text_part(""))

    def text_delta(self, text: str) -> dict[str, Any]:
        return self.event("response.output_text.delta", **self._part(), delta=text, logprobs=[])

    def text_closing(self, text: str) -> list[dict[str, Any]]:
        return [
            self.event("response.output_text.done", **self._part(), text=text, logprobs=[]),
            self.event("response.content_part.done", **self._part(), part=text_part(text)),
        ]

    def audio_delta(self, audio: bytes, sample_rate: int) -> dict[str, Any]:
        data = base64.b64encode(audio).decode("ascii")
        return self.event("response.audio.delta", response_id=self._response.id, delta=data, sample_rate=sample_rate)

    def audio_closing(self) -> dict[str, Any]:
        return self.event("response.audio.done", response_id=self._response.id)

    def closing(self, collected: Collected, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        status = status_of(collected)
        return [
            self.event("response.output_item.done", output_index=0, item=self._response.item(status, content)),
            self.event(f"response.{status}", response=self._response.ended(collected, content)),
        ]

    def failure(self, error: OmniError) -> dict[str, Any]:
        return self.event("response.failed", response=self._response.failed(error))

    def _part(self) -> dict[str, Any]:
        return {"item_id": self._response.item_id, "output_index": 0, "content_index": 0}
