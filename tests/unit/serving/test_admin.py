"""The admin surface: who may, and what it answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from omni_runtime.entry import admin_guard
from omni_runtime.errors import OmniError
from omni_runtime.serving import errors
from omni_runtime.serving.admin import AdminGuard, build_router
from tests.unit.orchestrator.conftest import Rig
from tests.unit.orchestrator.plans import a_plan

TOKEN = "0123456789abcdef"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(a_plan(), tmp_path / "curve", stack)
        await rig.start()
        yield rig


async def post(
    rig: Rig,
    path: str,
    *,
    guard: AdminGuard = AdminGuard(),
    peer: str = "127.0.0.1",
    headers: dict[str, str] | None = None,
    **body: Any,
) -> httpx.Response:
    app = FastAPI()
    errors.install(app)
    app.include_router(build_router(rig.orchestrator.administration, rig.orchestrator.status, guard))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(peer, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://entry") as http:
        return await http.post(f"/v1/omni/{path}", headers=headers, **body)


async def test_pause_and_resume(rig: Rig) -> None:
    assert (await post(rig, "pause")).json()["state"] == "Paused"
    assert rig.orchestrator.status().paused
    assert (await post(rig, "resume")).json() == {"state": "Running", "running": 0, "waiting": 0, "replicas": []}


async def test_sleep_and_wakeup(rig: Rig) -> None:
    thinker = await rig.replica("thinker")
    slept = (await post(rig, "sleep", json={"level": 1})).json()
    assert (slept["state"], slept["replicas"][0]["asleep"]) == ("Asleep", True)
    assert (await post(rig, "resume")).status_code == 409
    assert (await post(rig, "wakeup")).json()["state"] == "Running"
    assert not thinker.asleep


async def test_nobody_can_sleep(rig: Rig) -> None:
    thinker = await rig.replica("thinker")
    thinker.power_problem = "CountingEngine has nothing that sleep would give back"
    answer = await post(rig, "sleep")
    assert answer.status_code == 409
    assert answer.json()["replicas"][0]["problem"] == thinker.power_problem


@pytest.mark.parametrize(
    ("guard", "peer", "headers", "allowed"),
    [
        pytest.param(AdminGuard(), "127.0.0.1", {}, True, id="loopback"),
        pytest.param(AdminGuard(), "::1", {}, True, id="loopback v6"),
        pytest.param(AdminGuard(), "10.0.0.7", {}, False, id="from outside"),
        pytest.param(AdminGuard(), "127.0.0.6", {}, False, id="from outside, through a mesh"),
        pytest.param(AdminGuard(), "127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, False, id="through a proxy"),
        pytest.param(AdminGuard(), "127.0.0.1", {"origin": "http://evil.example"}, False, id="a web page"),
        pytest.param(AdminGuard(TOKEN), "10.0.0.7", {"authorization": f"Bearer {TOKEN}"}, True, id="token"),
        pytest.param(AdminGuard(TOKEN), "127.0.0.1", {}, False, id="no token"),
        pytest.param(AdminGuard(TOKEN), "10.0.0.7", {"authorization": "Bearer 0123456789abcdeF"}, False, id="wrong"),
        pytest.param(AdminGuard(TOKEN), "10.0.0.7", {"authorization": f"Basic {TOKEN}"}, False, id="another scheme"),
    ],
)
async def test_who_may(rig: Rig, guard: AdminGuard, peer: str, headers: dict[str, str], allowed: bool) -> None:
    answer = await post(rig, "pause", guard=guard, peer=peer, headers=headers)
    assert answer.status_code == (200 if allowed else 403)
    assert rig.orchestrator.status().paused is allowed
    assert TOKEN not in answer.text + repr(guard)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b'{"level": 2}', "level: 2", id="level 2"),
        pytest.param(b'{"timeout_seconds": 0}', "timeout_seconds", id="no time"),
        pytest.param(b"nonsense", "body", id="no JSON"),
        pytest.param(b'{"levle": 1}', "levle", id="a typing error"),
    ],
)
async def test_a_wrong_body_is_named(rig: Rig, body: bytes, message: str) -> None:
    answer = await post(rig, "sleep", content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert not rig.orchestrator.status().paused


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    plan = a_plan()
    off = Namespace(admin=False, admin_token_file=None)
    assert admin_guard(off, plan) is None
    assert admin_guard(Namespace(admin=True, admin_token_file=None), plan) == AdminGuard()
    in_spec = msgspec.structs.replace(plan, entry=msgspec.structs.replace(plan.entry, admin="Loopback"))
    assert admin_guard(off, in_spec) == AdminGuard()
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    assert admin_guard(Namespace(admin=False, admin_token_file=token), plan) == AdminGuard(TOKEN)
    token.write_text("short")
    with pytest.raises(OmniError, match="at least 16"):
        admin_guard(Namespace(admin=False, admin_token_file=token), plan)
