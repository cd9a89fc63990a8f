"""POST /tokenize and /detokenize: by the thinker's own tokenizer.

The entry has neither model files nor a tokenizer library. The thinker has both, so this is a small request to it like
any other, with its deadline, and it waits its turn like any other.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from omni_runtime.serving.body import body_schema, parse_body, read_body
from omni_runtime.serving.calls import build_call, check_modalities, check_model
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import context_of
from omni_runtime.serving.inputs import build_inputs
from omni_runtime.serving.params import StageParams
from omni_runtime.serving.schema.common import Common
from omni_runtime.serving.schema.tokens import REFUSED, DetokenizeRequest, TokenizeRequest
from omni_runtime.serving.streams import collect
from omni_runtime.topology.types import Modality

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    context = context_of(request)
    body = parse_body(await read_body(request), TokenizeRequest, REFUSED)
    check_model(body.model, context)
    asked: dict[str, Any]
    if body.messages is not None:
        asked = await build_inputs(body.messages, context.inputs, context.fetcher)
    else:
        asked = {"text": body.prompt, "add_special_tokens": body.add_special_tokens}
    ids = (await _ask(request, {"tokenize": asked}, body)).token_ids
    limit = dict(context.plan.stages[0].engine_args).get("max_model_len")
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": int(limit) if limit is not None else None,
        "token_strs": None,
    }


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    body = parse_body(await read_body(request), DetokenizeRequest)
    check_model(body.model, context_of(request))
    if not body.tokens:
        return {"prompt": ""}
    return {"prompt": "".join((await _ask(request, {"detokenize": body.tokens}, body)).text)}


async def _ask(request: Request, inputs: dict[str, Any], body: Common) -> Collected:
    context = context_of(request)
    modalities = check_modalities((Modality.TEXT,), context)
    call = build_call(request, modalities, StageParams(), inputs, body)
    return await collect(request, context.requests.submit(call))
