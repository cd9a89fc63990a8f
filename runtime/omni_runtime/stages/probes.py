"""HTTP of an engine process: /livez, /ready, /metrics. Nothing else; requests come over ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

Check = Callable[[], str | None]  # None: fine; else what is missing


async def serve_probes(port: int, *, live: Check, ready: Check, registry: CollectorRegistry) -> web.AppRunner:
    """Start the server on every address; the caller cleans the runner up."""

    async def livez(_: web.Request) -> web.Response:
        return _answer(live())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/ready", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner


def _answer(missing: str | None) -> web.Response:
    if missing is None:
        return web.Response(text="ok\n")
    return web.Response(status=503, text=missing + "\n")
