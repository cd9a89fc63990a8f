"""POST /v1/responses: OpenAI's newer form of a chat, without what a server would have to store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from omni_runtime.errors import OmniError
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.actions import Emit
from omni_runtime.orchestrator.calls import Call, Output
from omni_runtime.orchestrator.values import AudioPiece, TextPiece
from omni_runtime.serving.audio import StreamEncoder, encode_whole
from omni_runtime.serving.body import body_schema, parse_body, read_body
from omni_runtime.serving.calls import build_call, check_model, spoken_params
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.inputs import build_inputs
from omni_runtime.serving.response_events import Events, ResponseObject, audio_part, text_part
from omni_runtime.serving.schema.responses import REFUSED, ResponseRequest
from omni_runtime.serving.sse import named_sse
from omni_runtime.serving.streams import RequestStream, begin, collect
from omni_runtime.topology.types import Modality

router = APIRouter()
log = get_logger(__name__)


@router.post("/v1/responses", openapi_extra=body_schema(ResponseRequest))
async def create_response(request: Request) -> Response:
    context = context_of(request)
    body = parse_body(await read_body(request), ResponseRequest, REFUSED)
    response = ResponseObject(body, model=check_model(body.model, context))
    call = await _build_call(body, context, request)
    handle = context.requests.submit(call)
    log.debug("request.accepted", id=handle.request, surface="responses", stream=body.stream)
    if body.stream:
        opened = await begin(request, handle)
        return RequestStream(handle, _stream(body, call, response, opened.outputs()))
    collected = await collect(request, handle)
    content = await _content(body, call, collected)
    return Response(msgspec.json.encode(response.ended(collected, content)), media_type="application/json")


async def _build_call(body: ResponseRequest, context: ServingContext, request: Request) -> Call:
    modalities, params = spoken_params(body, context, max_tokens=body.max_output_tokens)
    inputs = await build_inputs(body.messages, context.inputs, context.fetcher, root="input")
    if body.instructions:
        inputs["messages"].insert(0, {"role": "system", "content": body.instructions})
    return build_call(request, modalities, params, inputs, body)


async def _content(body: ResponseRequest, call: Call, collected: Collected) -> list[dict[str, Any]]:
    spoken = "".join(collected.text)
    content = [text_part(spoken)] if Modality.TEXT in call.modalities else []
    if Modality.AUDIO in call.modalities:
        audio = await encode_whole(collected.pcm, collected.sample_rate, body.audio.format or "wav")
        content.append(audio_part(audio, spoken, collected))
    return content


async def _stream(
    body: ResponseRequest, call: Call, response: ResponseObject, outputs: AsyncIterator[Output]
) -> AsyncIterator[bytes]:
    collected = Collected(keep_samples=False)
    events = Events(response)
    encoder = StreamEncoder(body.audio.format or "pcm16")
    wants_text = Modality.TEXT in call.modalities
    for event in events.opening():
        yield named_sse(event)
    if wants_text:
        yield named_sse(events.text_opening())
    try:
        async for output in outputs:
            collected.add(output)
            match output:
                case Emit(piece=TextPiece(text=text)) if text and wants_text:
                    yield named_sse(events.text_delta(text))
                case Emit(piece=AudioPiece() as piece) if piece.pcm:
                    yield named_sse(events.audio_delta(encoder.encode(piece.pcm, piece.sample_rate), piece.sample_rate))
    except OmniError as error:
        yield named_sse(events.failure(error))
        return
    content = []
    if wants_text:
        content.append(text_part("".join(collected.text)))
        for event in events.text_closing("".join(collected.text)):
            yield named_sse(event)
    if Modality.AUDIO in call.modalities:
        yield named_sse(events.audio_closing())
    for event in events.closing(collected, content):
        yield named_sse(event)
