"""The measuring client against the app over a real socket."""

from __future__ import annotations

import asyncio
import wave
from pathlib import Path

import pytest

from omni_runtime.client import Answer, ServerUnreachable, ask, write_wav
from omni_runtime.errors import EngineError, StageUnavailable
from omni_runtime.protocol import control
from tests.unit.serving.conftest import Server


@pytest.fixture
async def url(server: Server) -> str:
    return f"http://127.0.0.1:{await server.listen()}"


async def test_ask_measures_text_and_audio(server: Server, url: str, tmp_path: Path) -> None:
    await server.replicas()
    seen: list[str] = []
    answer: Answer = await asyncio.to_thread(ask, url, "hi", on_text=seen.append, return_token_ids=True)
    assert answer.text == "".join(seen) == "Hello world."
    assert answer.audio_s == pytest.approx(0.3)
    assert 0 < answer.ttft_s <= answer.e2e_s
    assert 0 < answer.ttfp_s <= answer.e2e_s
    assert answer.rtf == pytest.approx(answer.e2e_s / 0.3)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == (100, 101, 102, 103)
    assert answer.pcm[0] == pytest.approx(0.1, abs=1e-4)
    write_wav(tmp_path / "reply.wav", answer.pcm, answer.sample_rate)
    with wave.open(str(tmp_path / "reply.wav")) as file:
        assert file.getnframes() == 7200


async def test_errors_arrive_as_the_servers_errors(server: Server, url: str) -> None:
    with pytest.raises(StageUnavailable, match="stage thinker"):
        await asyncio.to_thread(ask, url, "hi", modalities=("text",))

    def breaking(request: str) -> list[control.StageMessage]:
        return [control.ClientText(request, "Hel"), control.StageFailed(request, "EngineError", "boom")]

    await server.replica("thinker", script=breaking)
    with pytest.raises(EngineError, match="boom"):
        await asyncio.to_thread(ask, url, "hi", modalities=("text",))


async def test_no_server_says_where() -> None:
    with pytest.raises(ServerUnreachable, match="127.0.0.1:9"):
        await asyncio.to_thread(ask, "http://127.0.0.1:9", "hi")
