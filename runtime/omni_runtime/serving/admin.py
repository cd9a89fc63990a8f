"""Administration over HTTP: POST /v1/omni/pause, resume, sleep, wakeup. Served only where it was asked for.

Whoever may call these stops the pipeline for everybody. So they are for clients on the machine itself (in Kubernetes:
`kubectl exec` and `kubectl port-forward`), or for holders of the token.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.orchestrator.administration import Administration
from omni_runtime.orchestrator.power import ReplicaPower
from omni_runtime.orchestrator.status import OrchestratorStatus
from omni_runtime.serving.body import read_body
from omni_runtime.serving.context import Patience

MAX_BODY_BYTES = 4_096
_LOOPBACK = frozenset({"127.0.0.1", "::1"})  # not all of 127/8: service meshes deliver remote requests from 127.0.0.6
_PROXY_HEADERS = ("x-forwarded-for", "forwarded", "via", "x-real-ip")


class AdminRefused(OmniError):
    code = "Forbidden"
    http_status = 403


@dataclass(frozen=True, slots=True)
class AdminGuard:
    """token: what `Authorization: Bearer` must carry; None: no token, the loopback interface is the protection."""

    token: str | None = field(default=None, repr=False)

    def check(self, request: Request) -> None:
        """Raises AdminRefused."""
        headers = request.headers
        if "origin" in headers:  # a web page that a browser on this machine shows must not reach this
            raise AdminRefused("administration: not from a web page; use curl, or kubectl exec")
        if self.token is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
                raise AdminRefused("administration: the token is wrong; send Authorization: Bearer with the right one")
            return
        peer = request.client.host if request.client is not None else ""
        if peer not in _LOOPBACK or any(name in headers for name in _PROXY_HEADERS):
            raise AdminRefused(
                "administration: only from the loopback interface; use kubectl exec or port-forward, "
                "or start the entry with --admin-token-file"
            )


class PowerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: int = 1
    timeout_seconds: float = 60.0


class AdminState(msgspec.Struct, frozen=True, rename="camel"):
    state: str  # Running | Paused | Asleep: paused, and every replica that can sleep does
    running: int
    waiting: int
    replicas: tuple[ReplicaPower, ...] = ()  # what was asked of each, where something was


def build_router(
    administration: Administration, status: Callable[[], OrchestratorStatus], guard: AdminGuard
) -> APIRouter:
    def answer(replicas: tuple[ReplicaPower, ...] = ()) -> Response:
        now = status()
        state = "Paused" if now.paused else "Running"
        if now.paused and any(r.asleep for r in replicas):
            state = "Asleep"
        body = AdminState(state, now.running, now.waiting, replicas)
        nothing_done = bool(replicas) and all(r.problem for r in replicas)
        return Response(msgspec.json.encode(body), 409 if nothing_done else 200, media_type="application/json")

    router = APIRouter(prefix="/v1/omni", dependencies=[Depends(guard.check)])

    @router.post("/pause")
    async def pause() -> Response:
        administration.pause()
        return answer()

    @router.post("/resume")
    async def resume() -> Response:
        administration.resume()
        return answer()

    @router.post("/sleep")
    async def sleep(request: Request) -> Response:
        return answer(await administration.sleep((await _read(request)).timeout_seconds))

    @router.post("/wakeup")
    async def wakeup(request: Request) -> Response:
        return answer(await administration.wake_up((await _read(request)).timeout_seconds))

    return router


async def _read(request: Request) -> PowerRequest:
    body = await read_body(request, MAX_BODY_BYTES, Patience())
    fields: Any = {}
    try:
        fields = msgspec.json.decode(body) if body.strip() else {}
        asked = msgspec.convert(fields, PowerRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f'body: {error}; send JSON such as {{"level": 1, "timeout_seconds": 60}}') from error
    if asked.level != 1:
        raise InvalidRequest(f"level: {asked.level}: the only level is 1 (weights to host memory); use 1")
    if not 0.1 <= asked.timeout_seconds <= 600:
        raise InvalidRequest(f"timeout_seconds: {asked.timeout_seconds}: out of range; use 0.1 to 600")
    return asked
