"""x-request-id: taken from the client if it is harmless, made up otherwise, returned with every answer.

It is for logs only: the orchestrator, the stages and the connectors use an id of our own (R62).
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from omni_runtime.errors import OmniError
from omni_runtime.logs import get_logger, request_context
from omni_runtime.serving.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = get_logger(__name__)

_HARMLESS = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


def request_id_of(header: str | None) -> str:
    """The client's id if it is one, else a new one."""
    if header is not None and _HARMLESS.fullmatch(header) and ".." not in header:
        return header
    return uuid.uuid4().hex


class RequestIds:
    """ASGI middleware; plain, so that streams pass unbuffered and a disconnect reaches the endpoint."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        header = next((v for k, v in scope["headers"] if k == b"x-request-id"), None)
        request_id = request_id_of(header.decode("latin-1") if header is not None else None)
        scope.setdefault("state", {})["request_id"] = request_id
        if scope["type"] == "websocket":
            with request_context(request_id):
                await self._app(scope, receive, send)
            return

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        with request_context(request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:  # a bug: the client learns where to look, not what is inside
                if started:
                    raise
                log.exception("request.bug", path=scope["path"])
                answer = error_response(OmniError(f"internal error; the entry's log has it under request {request_id}"))
                await answer(scope, receive, send_with_id)
