"""The end of a replica: it answers for as long as calls still come, and then no longer."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

from omni_webhooks.server import AdmissionServer
from tests.unit.webhooks.test_site import site


async def test_quiet_is_when_no_call_came_for_a_while() -> None:
    """A call that is still shaking hands when the last answer is sent would find the door closed (T53)."""
    admission, now = AdmissionServer(site(), (), 75.0), asyncio.get_running_loop().time
    ended: list[float] = []
    async with TestClient(TestServer(admission.app())) as client:
        calls = [now()]
        await client.post("/validate", data=b"{}")
        waiting = asyncio.create_task(admission.quiet(0.5))
        waiting.add_done_callback(lambda _: ended.append(now()))
        while not waiting.done() and now() < calls[0] + 1.5:
            calls.append(now())
            await client.post("/validate", data=b"{}")
        async with asyncio.timeout(30):
            await waiting
    assert ended[0] - max(call for call in calls if call < ended[0]) >= 0.5


async def test_quiet_waits_for_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, asked, release = AdmissionServer(site(), (), 75.0), asyncio.Event(), asyncio.Event()

    async def answer(call: object, started: float) -> dict[str, object]:
        asked.set()
        await release.wait()
        return {}

    monkeypatch.setattr(admission, "_verdict", answer)
    body = {"request": {"uid": "u", "kind": {"kind": "OmniPipeline"}, "operation": "CREATE", "object": {}}}
    async with TestClient(TestServer(admission.app())) as client:
        call = asyncio.create_task(client.post("/validate", json=body))
        await asked.wait()
        waiting = asyncio.create_task(admission.quiet(0.05))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        release.set()
        assert (await call).status == 200
        async with asyncio.timeout(30):
            await waiting
