"""What a request has produced so far: text, samples, ids, codes, usage, and why it ended. No I/O."""

from __future__ import annotations

from typing import Any

from omni_runtime.orchestrator.actions import Emit, EmitStageEnd
from omni_runtime.orchestrator.calls import Output
from omni_runtime.orchestrator.values import AudioPiece, CodesPiece, TextPiece


class Collected:
    """Fed with every output of a request, in order. keep_samples: False where they have left already."""

    def __init__(self, keep_samples: bool = True) -> None:
        self._keep_samples = keep_samples
        self.text: list[str] = []
        self.samples: list[bytes] = []
        self.sample_rate = 0
        self.token_ids: list[int] = []
        self.codes: list[tuple[int, ...]] = []
        self.audio_seconds = 0.0
        self.frames = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._reasons: list[str] = []

    def add(self, output: Output) -> None:
        match output:
            case Emit(piece=TextPiece(text=text, token_ids=ids)):
                self.text.append(text)
                self.token_ids.extend(ids)
            case Emit(piece=AudioPiece() as piece):
                if self._keep_samples:
                    self.samples.append(piece.pcm)
                self.sample_rate = piece.sample_rate
                self.audio_seconds += piece.seconds
                self.frames += piece.frames
            case Emit(piece=CodesPiece(codes=codes)):
                self.codes.extend(codes)
            case EmitStageEnd(usage=usage):
                self.prompt_tokens += usage.prompt_tokens
                self.completion_tokens += usage.completion_tokens
                self._reasons.append(usage.finish_reason)

    @property
    def finish_reason(self) -> str:
        """length if any stage was cut off: an answer whose speech was cut is not complete (R23)."""
        return "length" if "length" in self._reasons else "stop"

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {"audio_tokens": self.frames},
            "audio_seconds": round(self.audio_seconds, 4),
        }

    def usage_so_far(self) -> dict[str, Any]:
        """While the thinker writes: its count comes with its end, so tokens are counted by their ids."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "total_tokens": self.prompt_tokens + len(self.token_ids),
        }

    @property
    def pcm(self) -> bytes:
        """float32 little-endian [n], the whole answer."""
        return b"".join(self.samples)

    def extensions(self, *, token_ids: bool, codec_codes: bool) -> dict[str, Any]:
        """Fields that the client asked for by name."""
        fields: dict[str, Any] = {}
        if token_ids:
            fields["token_ids"] = self.token_ids
        if codec_codes:
            fields["codec_codes"] = self.codes
        return fields
