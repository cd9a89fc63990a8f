"""asyncChunk and fullPayload are two ways to the same audio: real talker, real code2wav, real processes (R20, R22)."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks._servers import local_plan
from tests.e2e.null_pipeline import null_pipeline

pytestmark = pytest.mark.timeout(300)

TEXT = "Good morning, my friend. The weather is fine today, and the birds are singing in the garden. Listen to them!"
SEED = 7


def spoken(mode: str, chunk: dict[str, Any] | None = None) -> np.ndarray:
    """The speech of a pipeline whose edges have that mode. No thinker: it has no part in the speech of a given text."""
    edges: list[dict[str, Any]] = [
        {"from": "thinker", "to": "talker", "mode": mode},
        {"from": "talker", "to": "code2wav", "mode": mode} | ({"chunk": chunk} if chunk else {}),
    ]
    plan = local_plan("modes", {"model": {"uri": "file:///tmp"}, "topology": "smol_omni", "edges": edges})
    body = {"input": TEXT, "seed": SEED, "response_format": "pcm", "stream_format": "audio"}
    with null_pipeline(plan, null_stages=("thinker",)) as pipeline:
        answer = httpx.post(f"{pipeline.url}/v1/audio/speech", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        other = httpx.post(f"{pipeline.url}/v1/audio/speech", json=body | {"seed": SEED + 1}, timeout=120)
        pipeline.wait_free()
    assert answer.content != other.content, "the seed reached the stage that uses it"
    return np.frombuffer(answer.content, "<i2").astype(np.int32)


def test_both_modes_sound_the_same() -> None:
    whole = spoken("fullPayload")
    chunked = spoken("asyncChunk", {"initialFrames": 8, "frames": 40, "sizing": "ramp"})
    assert chunked.shape == whole.shape
    assert np.abs(chunked - whole).max() <= 1, "but for the last bit, where sums round"
    assert np.abs(whole).max() > 3_000, "speech, not silence"
