"""The ASGI application of the entry."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route

from omni_runtime.serving import chat, completions, errors, health, models, responses, speech, speech_stream, tokens
from omni_runtime.serving.context import ServingContext
from omni_runtime.serving.request_ids import RequestIds
from omni_runtime.serving.send_deadline import SendDeadline

SURFACES = (chat, responses, completions, speech, speech_stream, tokens, models, health)


def build_app(context: ServingContext) -> FastAPI:
    app = FastAPI(title="omni", version=context.version, docs_url=None, redoc_url=None)
    app.state.context = context
    app.add_middleware(RequestIds)
    app.add_middleware(SendDeadline, seconds=context.patience.send)
    errors.install(app)
    for surface in SURFACES:
        app.include_router(surface.router)
    # The route above describes itself in /openapi.json. Requests take a plain one: it does without the exit stacks and
    # the parameters of FastAPI's, which an endpoint that reads its own body has no use for.
    app.router.routes.insert(0, Route("/v1/chat/completions", chat.create_chat_completion, methods=["POST"]))
    return app
