"""Probes, /load, /metrics, /omni/status.

/livez: the process works; a dead stage never restarts the entry. /health and /ready: every stage that the outputs need
has a live replica, otherwise 503 with the stage's name (T69).
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from omni_runtime.serving.context import context_of

router = APIRouter()


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


@router.get("/livez")
async def get_live(request: Request) -> Response:
    failed = context_of(request).requests.failed
    return _json({"status": "failed", "reason": failed}, 500) if failed else _json({"status": "alive"})


@router.api_route("/health", methods=["GET", "HEAD"])  # some load balancers only want the status
@router.api_route("/ready", methods=["GET", "HEAD"])
async def get_ready(request: Request) -> Response:
    status = context_of(request).requests.status()
    if status.ready:
        return _json({"status": "healthy", "pipeline": status.pipeline, "revision": status.revision})
    if status.draining:
        reason = "the entry is draining"
    else:
        reason = f"no live replica of stage {', '.join(status.missing)}"
    return _json({"status": "unhealthy", "reason": reason, "missing": status.missing}, 503)


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """The name under which some platforms ask for /health."""
    return await get_ready(request)


@router.get("/load")
async def get_load(request: Request) -> Response:
    """Requests that are not through: `server_load` as vLLM's server tells it, and its two parts."""
    status = context_of(request).requests.status()
    return _json({"server_load": status.running + status.waiting, "running": status.running, "waiting": status.waiting})


@router.get("/omni/status")
async def get_status(request: Request) -> Response:
    return _json(context_of(request).requests.status())


@router.get("/metrics")
async def get_metrics(request: Request) -> Response:
    body, content_type = context_of(request).render_metrics()
    return Response(body, headers={"content-type": content_type})
