"""The ASGI application of the entry."""

from __future__ import annotations

from fastapi import FastAPI

from omni_runtime.serving import chat, errors, health, models, speech
from omni_runtime.serving.context import ServingContext
from omni_runtime.serving.request_ids import RequestIds


def build_app(context: ServingContext) -> FastAPI:
    app = FastAPI(title="omni", version=context.version, docs_url=None, redoc_url=None)
    app.state.context = context
    app.add_middleware(RequestIds)
    errors.install(app)
    for router in (chat.router, speech.router, models.router, health.router):
        app.include_router(router)
    return app
