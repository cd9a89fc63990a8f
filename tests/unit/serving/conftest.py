"""The whole entry in this process: app, orchestrator, real sockets, fake replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from omni_runtime.metrics.entry import EntryMetrics
from omni_runtime.serving.app import build_app
from omni_runtime.serving.context import ServingContext
from tests.unit.orchestrator.conftest import Rig
from tests.unit.orchestrator.plans import a_plan


class Server(Rig):
    """A Rig with the API in front."""

    metrics: EntryMetrics
    app: FastAPI
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    async def serve(self) -> None:
        self.metrics = EntryMetrics(self.plan)
        await self.start(observer=self.metrics)
        context = ServingContext(
            plan=self.plan,
            requests=self.orchestrator,
            render_metrics=self.metrics.render,
            inputs=("text", "audio", "image"),
            version="test",
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


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        server = Server(a_plan(), tmp_path / "curve", stack)
        await server.serve()
        yield server
