"""HTTP of the operator process: /livez, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

Probe = Callable[[], str | None]  # None: well; else what is wrong


async def serve(
    host: str,
    port: int,
    *,
    alive: Probe,
    ready: Probe,
    before_metrics: Callable[[], None],
    registry: CollectorRegistry = REGISTRY,
) -> web.AppRunner:
    """Start serving; the caller cleans the runner up."""

    def answer(probe: Probe) -> web.Response:
        problem = probe()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def livez(_: web.Request) -> web.Response:
        return answer(alive)

    async def readyz(_: web.Request) -> web.Response:
        return answer(ready)

    async def metrics(_: web.Request) -> web.Response:
        before_metrics()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
