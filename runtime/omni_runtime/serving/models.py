"""GET /v1/models, /version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.errors import UnknownModel

router = APIRouter()


def _card(name: str, context: ServingContext) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "omni",
        "root": context.plan.model.uri,
        "input_modalities": list(context.inputs),
        "output_modalities": sorted(context.outputs),
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    context = context_of(request)
    return {"object": "list", "data": [_card(n, context) for n in context.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    context = context_of(request)
    if name not in context.model_names:
        raise UnknownModel(f"model {name!r} is not served here; use {' or '.join(context.model_names)}")
    return _card(name, context)


@router.get("/version")
async def get_version(request: Request) -> dict[str, str]:
    context = context_of(request)
    return {"version": context.version, "pipeline": context.plan.pipeline, "revision": context.plan.revision}
