"""POST /v1/audio/speech: text -> speech, as one file or streamed; GET /v1/audio/voices.

The text goes straight to the stage that speaks text; the thinker has no part in it.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import HTTPConnection

from omni_runtime.errors import (
    FieldError,
    InvalidRequest,
    OmniError,
    ReplicaLost,
    StageUnavailable,
    StreamClosed,
    UpstreamLost,
)
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.actions import Emit
from omni_runtime.orchestrator.calls import Call, Output
from omni_runtime.orchestrator.values import AudioPiece
from omni_runtime.serving.audio import DEFAULT_SAMPLE_RATE, MEDIA_TYPES, StreamEncoder, encode_whole
from omni_runtime.serving.body import body_schema, parse_body, read_body
from omni_runtime.serving.calls import build_call, check_model, check_voice
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import ServingContext, SpeechStreams, context_of
from omni_runtime.serving.errors import error_body
from omni_runtime.serving.params import StageParams
from omni_runtime.serving.schema.speech import REFUSED, SpeechOptions, SpeechRequest
from omni_runtime.serving.sse import named_sse
from omni_runtime.serving.streams import Opened, RequestStream, begin, collect
from omni_runtime.topology.engines import ENGINES
from omni_runtime.topology.registry import TOPOLOGIES
from omni_runtime.topology.types import Modality, PayloadContract

router = APIRouter()
log = get_logger(__name__)

MAX_BODY_BYTES = 4 << 20


@router.post("/v1/audio/speech", openapi_extra=body_schema(SpeechRequest))
async def create_speech(request: Request) -> Response:
    context = context_of(request)
    speech = parse_body(await read_body(request, MAX_BODY_BYTES), SpeechRequest, REFUSED)
    call = build_speech_call(speech, speech.input, True, context, request)
    handle = context.requests.submit(call)
    log.debug("request.accepted", id=handle.request, surface="speech", stream=speech.streamed or "no")
    if speech.streamed is None:
        return await _whole(speech, await collect(request, handle))
    with breaks_counted(context.speech_streams):
        opened = await begin(request, handle)
    outputs = counted(opened.outputs(), context.speech_streams)
    if speech.streamed == "sse":
        return RequestStream(handle, _events(speech, outputs))
    return RequestStream(
        handle, _raw(speech, outputs), MEDIA_TYPES[speech.response_format], headers=_rate_header(opened)
    )


@router.get("/v1/audio/voices")
async def list_voices(request: Request) -> dict[str, Any]:
    """What a request's `voice` may be. Empty while no stage that speaks has registered."""
    return {"voices": list(context_of(request).voices()), "uploaded_voices": []}


# --- request


def build_speech_call(
    options: SpeechOptions, text: str, finished: bool, context: ServingContext, connection: HTTPConnection
) -> Call:
    """`finished` False: more text follows with `RequestHandle.append`.

    Raises UnknownModel, or InvalidRequest for what this pipeline cannot do.
    """
    check_model(options.model, context)
    stage = speaking_stage(context)
    _check_speed(options.speed, stage, context)
    params = StageParams(
        modalities=(Modality.AUDIO,),
        voice=check_voice(options.voice, context, "voice"),
        seed=options.seed,
        speed=options.speed,
        talker_max_tokens=options.max_new_tokens,
    )
    return build_call(
        connection,
        frozenset({Modality.AUDIO}),
        params,
        {"text": text, "finished": finished},
        options,
        start_stage=stage,
    )


def speaking_stage(context: ServingContext) -> str:
    """The stage that takes plain text and leads to audio. Raises InvalidRequest if the pipeline has none."""
    speaks = {s.name for s in context.plan.stages_for(frozenset({Modality.AUDIO}))}
    for edge in context.plan.edges:
        if edge.payload is PayloadContract.TEXT_SEGMENTS and edge.to in speaks:
            return edge.to
    able = [t.name for t in TOPOLOGIES.values() if any(e.payload is PayloadContract.TEXT_SEGMENTS for e in t.edges)]
    raise InvalidRequest(
        f"topology {context.plan.topology} has no stage that speaks plain text: its talker needs the thinker's hidden "
        f"states; ask /v1/chat/completions for audio, or serve a model of topology {' or '.join(able)}"
    )


def _check_speed(speed: float, stage: str, context: ServingContext) -> None:
    if speed != 1.0 and not ENGINES[context.plan.stage(stage).engine].speed:
        raise InvalidRequest(str(FieldError("speed", f"{speed:g}", "this model has one speed", "leave the field out")))


# --- answer


async def _whole(speech: SpeechRequest, collected: Collected) -> Response:
    audio = await encode_whole(collected.pcm, collected.sample_rate, speech.response_format)
    headers = {
        "x-audio-seconds": f"{collected.audio_seconds:.4f}",
        "x-sample-rate": str(collected.sample_rate or DEFAULT_SAMPLE_RATE),
    }
    return Response(audio, media_type=MEDIA_TYPES[speech.response_format], headers=headers)


def _rate_header(opened: Opened) -> dict[str, str]:
    """Bare samples do not say their rate."""
    for output in opened.head:
        match output:
            case Emit(piece=AudioPiece(sample_rate=rate)):
                return {"x-sample-rate": str(rate)}
    return {}


async def counted(outputs: AsyncIterator[Output], streams: SpeechStreams) -> AsyncIterator[Output]:
    """The same outputs; how they end is counted."""
    with breaks_counted(streams):
        async for output in outputs:
            yield output
    streams.speech_stream_completed()


@contextmanager
def breaks_counted(streams: SpeechStreams) -> Iterator[None]:
    """Around what opens a stream and what reads it: whoever leaves before the first sound has left too."""
    try:
        yield
    except StreamClosed:
        streams.speech_stream_aborted("cancelled")
        raise
    except OmniError as error:
        dead = isinstance(error, ReplicaLost | StageUnavailable | UpstreamLost)
        streams.speech_stream_aborted("engine_dead" if dead else "error")
        raise
    except BaseException:  # whoever reads has stopped reading
        streams.speech_stream_aborted("closed")
        raise


async def _raw(speech: SpeechRequest, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
    """An error breaks the connection off: bytes of audio have no place for it."""
    encoder = StreamEncoder(speech.response_format)
    async for output in outputs:
        match output:
            case Emit(piece=AudioPiece() as piece) if piece.pcm:
                yield encoder.encode(piece.pcm, piece.sample_rate)
    if last := encoder.finish():
        yield last


async def _events(speech: SpeechRequest, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
    collected = Collected(keep_samples=False)
    encoder = StreamEncoder(speech.response_format)
    try:
        async for output in outputs:
            collected.add(output)
            match output:
                case Emit(piece=AudioPiece() as piece) if piece.pcm:
                    audio = base64.b64encode(encoder.encode(piece.pcm, piece.sample_rate)).decode("ascii")
                    yield named_sse(
                        {
                            "type": "speech.audio.delta",
                            "audio": audio,
                            "response_format": speech.response_format,
                            "sample_rate": piece.sample_rate,
                        }
                    )
    except OmniError as error:
        yield named_sse({"type": "speech.audio.error", **error_body(error)})
        return
    yield named_sse({"type": "speech.audio.done", "usage": speech_usage(collected)})


def speech_usage(collected: Collected) -> dict[str, Any]:
    usage = collected.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": collected.frames,
        "total_tokens": usage["prompt_tokens"] + collected.frames,
        "audio_seconds": usage["audio_seconds"],
    }
