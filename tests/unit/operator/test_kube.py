"""The raw client against a small HTTP server: paging, expiry in the middle, rotated tokens, silence, broken bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import kopf
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from omni_operator.errors import Expired, NotFound, Transient, Unauthorized
from omni_operator.kinds import DEPLOYMENT, PIPELINE, SECRET
from omni_operator.kube import Kube
from omni_operator.rbac import MissingPermission

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.requests: list[web.Request] = []
        self.tokens = iter(("first", "second", "third"))
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        assert self.handler is not None
        return await self.handler(request)

    def login(self) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=self.url, token=next(self.tokens))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    async with TestServer(app) as running:
        fake.url = str(running.make_url("")).rstrip("/")
        yield fake


@pytest_asyncio.fixture
async def kube(server: Server) -> AsyncIterator[Kube]:
    client = Kube(server.login)
    yield client
    await client.close()


def refusal(code: int, reason: str, **details: Any) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": reason, "details": details}
    return web.json_response(body, status=code)


async def test_pages_are_one_list(server: Server, kube: Kube) -> None:
    async def pages(request: web.Request) -> web.StreamResponse:
        if "continue" not in request.query:
            return web.json_response({"items": [{"n": 1}], "metadata": {"continue": "more", "resourceVersion": "7"}})
        return web.json_response({"items": [{"n": 2}], "metadata": {"resourceVersion": "7"}})

    server.handler = pages
    assert [i["n"] for i in (await kube.list(PIPELINE, "ns")).items] == [1, 2]


async def test_a_list_that_expires_is_never_half(server: Server, kube: Kube) -> None:
    """T60: half a list would read as "the others are gone"."""

    async def pages(request: web.Request) -> web.StreamResponse:
        if "continue" not in request.query:
            return web.json_response({"items": [{"n": 1}], "metadata": {"continue": "more"}})
        return refusal(410, "Expired")

    server.handler = pages
    with pytest.raises(Expired):
        await kube.list(PIPELINE, "ns")


async def test_rotated_token_is_read_again_once(server: Server, kube: Kube) -> None:
    async def only_second(request: web.Request) -> web.StreamResponse:
        good = request.headers["Authorization"] == "Bearer second"
        return web.json_response({"ok": True}) if good else refusal(401, "Unauthorized")

    server.handler = only_second
    assert await kube.get(PIPELINE, "ns", "p") == {"ok": True}

    async def never(request: web.Request) -> web.StreamResponse:
        return refusal(401, "Unauthorized")

    server.handler = never
    with pytest.raises(Unauthorized):
        await kube.get(PIPELINE, "ns", "p")


async def test_silence_and_nonsense_are_transient(server: Server, kube: Kube) -> None:
    forever = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        await forever.wait()
        return web.Response()

    server.handler = silent
    with pytest.raises(Transient):
        await kube.get(PIPELINE, "ns", "p", timeout=0.2)
    forever.set()

    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>welcome to the proxy</html>")

    server.handler = page
    with pytest.raises(Transient):
        await kube.get(PIPELINE, "ns", "p")

    async def missing(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text="no route")

    server.handler = missing
    with pytest.raises(Transient):
        await kube.get(PIPELINE, "ns", "p")


async def test_not_found_is_said_by_the_server_about_the_object(server: Server, kube: Kube) -> None:
    async def gone(request: web.Request) -> web.StreamResponse:
        return refusal(404, "NotFound", name="p", kind="omnipipelines")

    server.handler = gone
    with pytest.raises(NotFound):
        await kube.get(PIPELINE, "ns", "p")


async def test_delete_carries_its_preconditions(server: Server, kube: Kube) -> None:
    bodies: list[Any] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({"kind": "Status"})

    server.handler = keep
    await kube.delete(DEPLOYMENT, "ns", "d", uid="u", resource_version="9")
    assert bodies[0]["preconditions"] == {"uid": "u", "resourceVersion": "9"}


async def test_a_call_that_rbac_does_not_grant_is_never_sent(server: Server, kube: Kube) -> None:
    with pytest.raises(MissingPermission):
        await kube.get(SECRET, "ns", "p-curve")
    assert server.requests == []
