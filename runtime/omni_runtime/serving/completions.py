"""POST /v1/completions: text that goes on from a prompt, without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.actions import Emit
from omni_runtime.orchestrator.calls import Output
from omni_runtime.orchestrator.values import TextPiece
from omni_runtime.serving.body import body_schema, parse_body, read_body
from omni_runtime.serving.calls import build_call, check_modalities, check_model, sampling_params
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.schema.completions import REFUSED, CompletionRequest
from omni_runtime.serving.sse import DONE, sse, sse_error
from omni_runtime.serving.streams import RequestStream, begin, collect
from omni_runtime.topology.types import Modality, PayloadContract

router = APIRouter()
log = get_logger(__name__)


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = parse_body(await read_body(request), CompletionRequest, REFUSED)
    answer = Completion(model=check_model(body.model, context))
    check_completes(context)
    modalities = check_modalities((Modality.TEXT,), context)
    counts = body.stream and body.stream_options.include_usage and body.stream_options.continuous_usage_stats
    params = sampling_params(
        body, modalities, max_tokens=body.max_tokens, return_token_ids=body.return_token_ids or counts
    )
    call = build_call(request, modalities, params, {"prompt": body.prompt}, body)
    handle = context.requests.submit(call)
    log.debug("request.accepted", id=handle.request, surface="completions", stream=body.stream)
    if body.stream:
        opened = await begin(request, handle)
        return RequestStream(handle, _stream(body, answer, opened.outputs(), counts))
    collected = await collect(request, handle)
    extensions = collected.extensions(token_ids=body.return_token_ids, codec_codes=False)
    whole = answer.choice("".join(collected.text), collected.finish_reason, usage=collected.usage(), **extensions)
    return Response(msgspec.json.encode(whole), media_type="application/json")


def check_completes(context: ServingContext) -> None:
    """Raises InvalidRequest where the model's later stages find their way by the turns of the chat template."""
    first = context.plan.stages[0].name
    if any(e.payload is PayloadContract.THINKER_HIDDEN for e in context.plan.edges_from(first)):
        raise InvalidRequest(
            f"topology {context.plan.topology} needs its chat template, which a bare prompt has not; "
            "use /v1/chat/completions"
        )


@dataclass(frozen=True, slots=True)
class Completion:
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def choice(self, text: str, finish_reason: str | None, **more: Any) -> dict[str, Any]:
        choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}]
        return {**self._head(), "choices": choices, **more}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


async def _stream(
    body: CompletionRequest, answer: Completion, outputs: AsyncIterator[Output], counts: bool
) -> AsyncIterator[bytes]:
    collected = Collected()
    try:
        async for output in outputs:
            collected.add(output)
            match output:
                case Emit(piece=TextPiece(text=text)) if text:
                    usage: dict[str, Any] = {"usage": collected.usage_so_far()} if counts else {}
                    yield sse(answer.choice(text, None, **usage))
    except OmniError as error:
        yield sse_error(error)
        return
    extensions = collected.extensions(token_ids=body.return_token_ids, codec_codes=False)
    yield sse(answer.choice("", collected.finish_reason, **extensions))
    if body.stream_options.include_usage:
        yield sse(answer.usage(collected.usage()))
    yield DONE
