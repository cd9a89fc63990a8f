"""POST /v1/chat/completions: text and speech, streamed or whole."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from omni_runtime.errors import FieldError, InvalidRequest, OmniError
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.actions import Emit
from omni_runtime.orchestrator.calls import Call, Output
from omni_runtime.orchestrator.values import AudioPiece, TextPiece
from omni_runtime.serving.audio import StreamEncoder, encode_whole
from omni_runtime.serving.body import body_schema, parse_body, read_body
from omni_runtime.serving.calls import build_call, check_model, spoken_params
from omni_runtime.serving.chunks import Completion
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.inputs import build_inputs
from omni_runtime.serving.schema.chat import REFUSED, ChatRequest
from omni_runtime.serving.sse import DONE, sse, sse_error
from omni_runtime.serving.streams import RequestStream, begin, collect
from omni_runtime.topology.types import Modality, PayloadContract

router = APIRouter()
log = get_logger(__name__)


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    chat = parse_body(await read_body(request), ChatRequest, REFUSED)
    completion = Completion(model=check_model(chat.model, context))
    call = await build_chat_call(chat, context, request)
    handle = context.requests.submit(call)
    log.debug("request.accepted", id=handle.request, modalities=sorted(call.modalities), stream=chat.stream)
    if chat.stream:
        opened = await begin(request, handle)
        return RequestStream(handle, _stream(chat, call, completion, opened.outputs()))
    return await _whole(chat, call, completion, await collect(request, handle))


async def build_chat_call(chat: ChatRequest, context: ServingContext, request: Request) -> Call:
    """Raises InvalidRequest for what this pipeline cannot do."""
    modalities, params = spoken_params(
        chat,
        context,
        max_tokens=chat.token_limit,
        talker_max_tokens=chat.talker_max_tokens,
        talker_temperature=chat.talker_temperature,
        return_token_ids=chat.return_token_ids or _counts_tokens(chat),
    )
    _check_codes(chat, modalities, context)
    inputs = await build_inputs(chat.messages, context.inputs, context.fetcher)
    return build_call(request, modalities, params, inputs, chat, emit_codes=chat.return_codec_codes)


def _counts_tokens(chat: ChatRequest) -> bool:
    options = chat.stream_options
    return chat.stream and options.include_usage and options.continuous_usage_stats


def _check_codes(chat: ChatRequest, modalities: frozenset[Modality], context: ServingContext) -> None:
    if not chat.return_codec_codes:
        return
    if Modality.AUDIO not in modalities:
        fix = 'add "audio" to modalities'
        raise InvalidRequest(str(FieldError("return_codec_codes", "true", "no audio is asked for", fix)))
    if not any(e.payload is PayloadContract.CODEC_FRAMES for e in context.plan.edges):
        fix = "leave the field out"
        raise InvalidRequest(str(FieldError("return_codec_codes", "true", "this model has no codec codes", fix)))


async def _whole(chat: ChatRequest, call: Call, completion: Completion, collected: Collected) -> Response:
    audio = None
    if Modality.AUDIO in call.modalities:
        audio = await encode_whole(collected.pcm, collected.sample_rate, chat.audio.format or "wav")
    body = completion.whole(
        collected,
        text=Modality.TEXT in call.modalities,
        audio=audio,
        extensions=_extensions(chat, collected),
    )
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _stream(
    chat: ChatRequest, call: Call, completion: Completion, outputs: AsyncIterator[Output]
) -> AsyncIterator[bytes]:
    collected = Collected(keep_samples=False)
    encoder = StreamEncoder(chat.audio.format)
    counts = _counts_tokens(chat)
    last = Modality.TEXT if Modality.TEXT in call.modalities else Modality.AUDIO
    yield sse(completion.chunk({"role": "assistant", "content": ""}, last))
    try:
        async for output in outputs:
            collected.add(output)
            match output:
                case Emit(piece=TextPiece(text=text)) if text and Modality.TEXT in call.modalities:
                    last = Modality.TEXT
                    usage: dict[str, Any] = {"usage": collected.usage_so_far()} if counts else {}
                    yield sse(completion.chunk({"content": text}, Modality.TEXT, **usage))
                case Emit(piece=AudioPiece() as piece) if piece.pcm:
                    last = Modality.AUDIO
                    content = base64.b64encode(encoder.encode(piece.pcm, piece.sample_rate)).decode("ascii")
                    yield sse(completion.chunk({"content": content}, Modality.AUDIO, sample_rate=piece.sample_rate))
    except OmniError as error:
        yield sse_error(error)
        return
    if Modality.AUDIO in call.modalities:
        last = Modality.AUDIO
    extensions = _extensions(chat, collected)
    yield sse(completion.chunk({}, last, finish_reason=collected.finish_reason, **extensions))
    if chat.stream_options.include_usage:
        yield sse(completion.usage_chunk(collected.usage()))
    yield DONE


def _extensions(chat: ChatRequest, collected: Collected) -> dict[str, Any]:
    return collected.extensions(token_ids=chat.return_token_ids, codec_codes=chat.return_codec_codes)
