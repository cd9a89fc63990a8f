"""POST /v1/chat/completions: text and speech, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from omni_runtime.errors import FieldError, InvalidRequest, OmniError, StreamClosed
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.calls import CLIENT_DISCONNECT, DEFAULT_DEADLINE_SECONDS, Call, Output, RequestHandle
from omni_runtime.orchestrator.state import AudioPiece, Emit, TextPiece
from omni_runtime.serving.audio import AudioEncoder
from omni_runtime.serving.chunks import DONE, Completion, sse, sse_error
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.errors import BodyTooLarge, UnknownModel, invalid_fields
from omni_runtime.serving.inputs import build_inputs
from omni_runtime.serving.params import StageParams
from omni_runtime.serving.schema import ChatRequest, unsupported_fields
from omni_runtime.topology.types import Modality, PayloadContract

router = APIRouter()
log = get_logger(__name__)

MAX_BODY_BYTES = 100 << 20


@router.post(
    "/v1/chat/completions",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": ChatRequest.model_json_schema()}}}
    },
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    chat = parse_chat(await read_body(request))
    call = build_call(chat, context, label=request.state.request_id)
    completion = Completion(model=chat.model or context.model_names[0])
    handle = context.requests.submit(call)
    log.info("request.accepted", id=handle.request, modalities=sorted(call.modalities), stream=chat.stream)
    if not chat.stream:
        collected = await _unless_gone(request, handle, _collect(handle))
        return _whole(chat, call, completion, collected)
    outputs = handle.outputs()
    # The first output decides the status: what fails before it is an HTTP error, not a broken stream.
    first = await _unless_gone(request, handle, _next(outputs))
    body = _stream(chat, call, completion, first, outputs)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return _EventStream(handle, body, media_type="text/event-stream", headers=headers)


class _EventStream(StreamingResponse):
    """A stream whose end, however it comes, is the end of its request on every stage (R16)."""

    def __init__(self, handle: RequestHandle, body: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(body, **options)
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel(CLIENT_DISCONNECT)


# --- request


async def read_body(request: Request) -> bytes:
    """The body, up to MAX_BODY_BYTES, whatever content-length says. Raises BodyTooLarge."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body is over {MAX_BODY_BYTES} bytes; send less media")
        pieces.append(piece)
    return b"".join(pieces)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest, which names every wrong field."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"body: not JSON: {error}; send a JSON object") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"body: {type(fields).__name__}: not an object; send a JSON object")
    problem = unsupported_fields(fields)
    if problem is not None:
        raise InvalidRequest(problem)
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from error


def build_call(chat: ChatRequest, context: ServingContext, label: str) -> Call:
    """Raises UnknownModel, or InvalidRequest for what this pipeline cannot do."""
    if chat.model is not None and chat.model not in context.model_names:
        raise UnknownModel(f"model {chat.model!r} is not served here; use {' or '.join(context.model_names)}")
    modalities = frozenset(Modality(m) for m in chat.modalities)
    beyond = sorted(modalities - context.outputs)
    if beyond:
        fix = f"use {', '.join(sorted(context.outputs))}"
        raise InvalidRequest(str(FieldError("modalities", ", ".join(beyond), "this model does not give it", fix)))
    codes = chat.return_codec_codes
    if codes and Modality.AUDIO not in modalities:
        fix = 'add "audio" to modalities'
        raise InvalidRequest(str(FieldError("return_codec_codes", "true", "no audio is asked for", fix)))
    if codes and not any(e.payload is PayloadContract.CODEC_FRAMES for e in context.plan.edges):
        fix = "leave the field out"
        raise InvalidRequest(str(FieldError("return_codec_codes", "true", "this model has no codec codes", fix)))
    params = StageParams(
        modalities=tuple(sorted(modalities)),
        temperature=chat.temperature,
        top_p=chat.top_p,
        top_k=max(0, chat.top_k),
        max_tokens=chat.token_limit,
        stop=tuple(chat.stop),
        seed=chat.seed,
        ignore_eos=chat.ignore_eos,
        voice=chat.audio.voice,
        talker_max_tokens=chat.talker_max_tokens,
        talker_temperature=chat.talker_temperature,
        return_token_ids=chat.return_token_ids,
    )
    return Call(
        modalities=modalities,
        params=params,
        inputs=build_inputs(chat.messages, context.inputs),
        emit_codes=codes,
        deadline_seconds=chat.timeout_seconds or DEFAULT_DEADLINE_SECONDS,
        label=label,
    )


# --- answer


async def _collect(handle: RequestHandle) -> Collected:
    collected = Collected()
    async for output in handle.outputs():
        collected.add(output)
    return collected


def _whole(chat: ChatRequest, call: Call, completion: Completion, collected: Collected) -> Response:
    body = completion.whole(
        collected,
        text=Modality.TEXT in call.modalities,
        audio=Modality.AUDIO in call.modalities,
        audio_format=chat.audio.format or "wav",
        extensions=collected.extensions(token_ids=chat.return_token_ids, codec_codes=chat.return_codec_codes),
    )
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _stream(
    chat: ChatRequest, call: Call, completion: Completion, first: Output | None, outputs: AsyncIterator[Output]
) -> AsyncIterator[bytes]:
    """Server-sent events. Whoever stops reading ends the iteration, and with it the request (R16)."""
    collected = Collected()
    encoder = AudioEncoder(chat.audio.format or "pcm16")
    opening = Modality.TEXT if Modality.TEXT in call.modalities else Modality.AUDIO
    last = opening
    yield sse(completion.chunk({"role": "assistant", "content": ""}, opening))
    try:
        async for output in _chain(first, outputs):
            collected.add(output)
            match output:
                case Emit(piece=TextPiece(text=text)) if text and Modality.TEXT in call.modalities:
                    last = Modality.TEXT
                    yield sse(completion.chunk({"content": text}, Modality.TEXT))
                case Emit(piece=AudioPiece() as piece) if piece.pcm:
                    last = Modality.AUDIO
                    content = encoder.encode(piece.pcm, piece.sample_rate)
                    yield sse(completion.chunk({"content": content}, Modality.AUDIO, sample_rate=piece.sample_rate))
    except OmniError as error:
        yield sse_error(error)
        return
    if Modality.AUDIO in call.modalities:
        last = Modality.AUDIO
    extensions = collected.extensions(token_ids=chat.return_token_ids, codec_codes=chat.return_codec_codes)
    yield sse(completion.chunk({}, last, finish_reason=collected.finish_reason, **extensions))
    if chat.stream_options.include_usage:
        yield sse(completion.usage_chunk(collected.usage()))
    yield DONE


async def _chain(first: Output | None, rest: AsyncIterator[Output]) -> AsyncIterator[Output]:
    if first is not None:
        yield first
        async for output in rest:
            yield output


async def _next(outputs: AsyncIterator[Output]) -> Output | None:
    """None: the request ended without any output."""
    return await anext(outputs, None)


async def _unless_gone(request: Request, handle: RequestHandle, work: Any) -> Any:
    """The result of `work`, or StreamClosed as soon as the client has gone, which also aborts the request (R16)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StreamClosed("the client closed the connection")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            handle.cancel(CLIENT_DISCONNECT)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
