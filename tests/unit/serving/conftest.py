"""The whole entry in this process: app, orchestrator, real sockets, fake replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from omni_runtime.metrics.entry import EntryMetrics
from omni_runtime.protocol import control
from omni_runtime.serving.app import build_app
from omni_runtime.serving.context import Patience, ServingContext
from omni_runtime.serving.fetch import MediaFetcher
from omni_runtime.topology.types import PayloadContract
from tests.unit.orchestrator.conftest import Rig, eventually
from tests.unit.orchestrator.fake_stage import FakeStage
from tests.unit.orchestrator.plans import a_plan


class Server(Rig):
    """A Rig with the API in front."""

    metrics: EntryMetrics
    app: FastAPI
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    async def serve(self, patience: Patience | None = None, fetcher: MediaFetcher | None = None) -> None:
        self.metrics = EntryMetrics(self.plan)
        await self.start(observer=self.metrics)
        context = ServingContext(
            plan=self.plan,
            requests=self.orchestrator,
            render_metrics=self.metrics.render,
            inputs=("text", "audio", "image"),
            version="test",
            fetcher=fetcher or MediaFetcher(),
            patience=patience or Patience(),
            speech_streams=self.metrics,
        )
        self.app = build_app(context)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://entry", timeout=10)
        )
        self.openai = AsyncOpenAI(base_url="http://entry/v1", api_key="none", http_client=self.http, max_retries=0)

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def speech(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/audio/speech", json={"input": "Good morning.", **fields})

    async def listen(self) -> int:
        """The app on a real port of the loopback; the port."""
        listener = socket.create_server(("127.0.0.1", 0))
        http = uvicorn.Server(
            uvicorn.Config(self.app, log_config=None, timeout_graceful_shutdown=1, ws_per_message_deflate=False)
        )
        task = asyncio.create_task(http.serve(sockets=[listener]))

        async def stop() -> None:
            http.should_exit = True
            await task

        self._stack.push_async_callback(stop)
        await eventually(lambda: http.started)
        return int(listener.getsockname()[1])

    async def post_and_leave(self, path: str, body: dict[str, Any], left: asyncio.Event) -> list[bytes]:
        """A POST whose client goes away when `left` is set, as an ASGI server tells it; the body that came before."""
        pieces: list[bytes] = []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                pieces.append(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "server": ("entry", 80),
            "client": ("client", 1),
        }
        async with asyncio.timeout(10):
            await self.app(scope, receive, send)  # type: ignore[arg-type]
        return pieces


async def submit_of(stage: FakeStage) -> control.Submit:
    """The first request of a replica; others may have ended it for the client before it arrived there."""
    await asyncio.wait_for(stage.submitted.wait(), 5)
    return next(iter(stage.submits.values()))


def sse_events(body: str) -> list[Any]:
    """The JSON of server-sent events, in order; "[DONE]" stays as it is."""
    data = [line[5:].strip() for line in body.splitlines() if line.startswith("data:")]
    return [json.loads(d) if d != "[DONE]" else d for d in data]


@contextlib.asynccontextmanager
async def a_server(
    keys: Path, *, first_edge: PayloadContract = PayloadContract.THINKER_HIDDEN, **options: Any
) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        server = Server(a_plan(first_edge=first_edge), keys, stack)
        await server.serve(**options)
        yield server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Qwen3-Omni's shape: the talker needs the thinker's hidden states."""
    async with a_server(tmp_path / "curve") as server:
        yield server


@pytest.fixture
async def speaking(tmp_path: Path) -> AsyncIterator[Server]:
    """smol_omni's shape: the talker takes text."""
    async with a_server(tmp_path / "curve", first_edge=PayloadContract.TEXT_SEGMENTS) as server:
        yield server
