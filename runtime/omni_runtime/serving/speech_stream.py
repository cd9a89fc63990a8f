"""WebSocket /v1/audio/speech/stream: text in pieces, speech while it comes. vLLM-Omni's messages; see docs/serving.md.

One connection speaks utterance after utterance. An utterance is one request to the pipeline, or with
`split_granularity` one per sentence or clause; they are spoken in order, one at a time, while the client's messages go
on being read. Whatever ends the connection ends the request that is being spoken (R16).
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.actions import Emit
from omni_runtime.orchestrator.calls import CLIENT_DISCONNECT, SLOW_CLIENT, RequestHandle
from omni_runtime.orchestrator.values import AudioPiece
from omni_runtime.serving.audio import encode_whole, pcm16
from omni_runtime.serving.body import parse_fields
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.schema.speech import REFUSED, InputText, SessionConfig
from omni_runtime.serving.speech import build_speech_call, counted
from omni_runtime.stages.ar_vllm.segments import SpeechSegmenter

router = APIRouter()
log = get_logger(__name__)

MAX_MESSAGE_BYTES = 128 << 10
MAX_PENDING_CHARACTERS = 200_000  # received and not spoken yet
CLOSED_NORMALLY, CLOSED_FOR_POLICY, CLOSED_TOO_BIG = 1000, 1008, 1009


class SessionOver(Exception):
    """The server ends the connection."""

    def __init__(self, code: int, reason: str) -> None:
        self.code = code
        super().__init__(reason)


@dataclass(slots=True, eq=False)
class _Unit:
    """What one request speaks: text that may still grow, also while it is being spoken."""

    config: SessionConfig
    utterance: int
    sentence: int
    text: str
    finished: bool
    handle: RequestHandle | None = None

    def append(self, text: str, finished: bool) -> None:
        self.text += text
        self.finished = finished
        if self.handle is not None:
            self.handle.append(text, finished)


@dataclass(frozen=True, slots=True)
class _Flushed:
    """The utterance's units are all before this in the queue."""

    utterance: int
    units: int


@dataclass(slots=True, eq=False)
class _Utterance:
    """Text of the client up to its input.done, cut into units."""

    config: SessionConfig
    index: int
    units: int = 0
    growing: _Unit | None = None  # the one unit of an utterance that is not split
    segmenter: SpeechSegmenter | None = None

    def __post_init__(self) -> None:
        if self.config.split_granularity != "none":
            self.segmenter = SpeechSegmenter(clauses=self.config.split_granularity == "clause")

    def push(self, text: str) -> list[_Unit]:
        """Units that are new."""
        if self.segmenter is not None:
            return [self._unit(phrase, finished=True) for phrase in self.segmenter.push(text)]
        if self.growing is not None:
            self.growing.append(text, finished=False)
            return []
        if not text.strip():
            return []
        self.growing = self._unit(text, finished=False)
        return [self.growing]

    def finish(self) -> list[_Unit]:
        if self.segmenter is not None:
            return [self._unit(phrase, finished=True) for phrase in self.segmenter.flush()]
        if self.growing is not None:
            self.growing.append("", finished=True)
        return []

    def _unit(self, text: str, finished: bool) -> _Unit:
        self.units += 1
        return _Unit(self.config, self.index, self.units - 1, text, finished)


@router.websocket("/v1/audio/speech/stream")
async def stream_speech(socket: WebSocket) -> None:
    await socket.accept()
    await SpeechSession(socket, context_of(socket)).run()


@dataclass(slots=True, eq=False)
class SpeechSession:
    socket: WebSocket
    context: ServingContext
    _config: SessionConfig | None = None
    _utterance: _Utterance | None = None
    _utterances: int = 0
    _queue: asyncio.Queue[_Unit | _Flushed] = field(default_factory=asyncio.Queue)
    _pending: int = 0  # characters
    _busy: int = 0  # units and flushes that are not through

    async def run(self) -> None:
        speaker = asyncio.create_task(self._speak(), name="speech session")
        listener = asyncio.create_task(self._listen(), name="speech session input")
        try:
            await asyncio.wait({speaker, listener}, return_when=asyncio.FIRST_COMPLETED)
            for task in (speaker, listener):
                if task.done():
                    task.result()
        except WebSocketDisconnect:
            log.info("speech.disconnected", utterances=self._utterances)
        except SessionOver as end:
            log.info("speech.closed", code=end.code, reason=str(end), utterances=self._utterances)
            await self._close(end)
        except OmniError as error:
            await self._close(SessionOver(CLOSED_FOR_POLICY, str(error)))
        except TimeoutError:
            log.warning("speech.slow_client", seconds=self.context.patience.send)
        finally:
            for task in (speaker, listener):
                task.cancel()
            await asyncio.gather(speaker, listener, return_exceptions=True)

    async def _close(self, end: SessionOver) -> None:
        try:
            async with asyncio.timeout(self.context.patience.send):
                if end.code != CLOSED_NORMALLY:
                    await self.socket.send_json({"type": "error", "message": str(end), "code": "SessionOver"})
                await self.socket.close(end.code, str(end)[:120])
        except (TimeoutError, WebSocketDisconnect, RuntimeError):  # it left first
            pass

    # --- the client's messages

    async def _listen(self) -> None:
        while True:
            message = await self._receive()
            match message.get("type"):
                case "session.close":
                    await self._end()
                case "session.config":
                    await self._configure(message)
                case _ if self._config is None:
                    raise SessionOver(CLOSED_FOR_POLICY, "the first message must be session.config")
                case "input.text":
                    await self._take_text(message)
                case "input.done":
                    self._flush()
                case other:
                    known = "session.config, input.text, input.done, session.close"
                    await self._report(InvalidRequest(f"type: {str(other)[:40]!r}: unknown message; use {known}"))

    async def _receive(self) -> dict[str, Any]:
        while True:
            try:
                async with asyncio.timeout(
                    self.context.patience.session_config if self._config is None else self.context.patience.session_idle
                ):
                    raw = await self.socket.receive()
            except TimeoutError:
                if self._config is None:
                    raise SessionOver(CLOSED_FOR_POLICY, "no session.config came") from None
                if self._utterance is None and self._busy:
                    continue  # it is the client who waits
                raise SessionOver(
                    CLOSED_FOR_POLICY, f"no message for {self.context.patience.session_idle:g} s"
                ) from None
            if raw["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(raw.get("code", CLOSED_NORMALLY))
            message = await self._decode(raw.get("text"))
            if message is not None:
                return message

    async def _decode(self, text: str | None) -> dict[str, Any] | None:
        """None: it was wrong, and the client knows."""
        problem = "is not JSON; send JSON objects in text frames"
        if text is not None and len(text) > MAX_MESSAGE_BYTES:
            raise SessionOver(CLOSED_TOO_BIG, f"a message is over {MAX_MESSAGE_BYTES} bytes; send the text in pieces")
        if text is not None:
            try:
                message = msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                pass
            else:
                if isinstance(message, dict):
                    return message
                problem = f"is not an object but {type(message).__name__}; send JSON objects"
        if self._config is None:
            raise SessionOver(CLOSED_FOR_POLICY, f"message: {problem}")
        await self._report(InvalidRequest(f"message: {problem}"))
        return None

    async def _configure(self, message: dict[str, Any]) -> None:
        if self._utterance is not None:
            await self._report(InvalidRequest("session.config: an utterance is open; send input.done first"))
            return
        try:
            config = parse_fields(message, SessionConfig, REFUSED)
            build_speech_call(config, "", False, self.context, self.socket)  # says now what no utterance could do
        except OmniError as error:
            if self._config is None:
                raise SessionOver(CLOSED_FOR_POLICY, str(error)) from error
            await self._report(error)
            return
        self._config = config

    async def _take_text(self, message: dict[str, Any]) -> None:
        try:
            text = parse_fields(message, InputText).text
        except InvalidRequest as error:
            await self._report(error)
            return
        if not text:
            return
        assert self._config is not None
        if self._utterance is None:
            self._utterance = _Utterance(self._config, self._utterances)
            self._utterances += 1
        self._pending += len(text)
        if self._pending > MAX_PENDING_CHARACTERS:
            raise SessionOver(
                CLOSED_TOO_BIG, f"over {MAX_PENDING_CHARACTERS} characters wait to be spoken; send them later"
            )
        for unit in self._utterance.push(text):
            self._enqueue(unit)

    def _flush(self) -> None:
        assert self._config is not None
        utterance, self._utterance = self._utterance, None
        if utterance is None:  # nothing was sent; the client still gets its answer
            utterance = _Utterance(self._config, self._utterances)
            self._utterances += 1
        for unit in utterance.finish():
            self._enqueue(unit)
        self._enqueue(_Flushed(utterance.index, utterance.units))

    def _enqueue(self, item: _Unit | _Flushed) -> None:
        self._busy += 1
        self._queue.put_nowait(item)

    async def _end(self) -> None:
        """What was flushed is still spoken; text without its input.done is dropped."""
        if self._utterance is None:
            await self._queue.join()
        raise SessionOver(CLOSED_NORMALLY, "closed by the client")

    # --- speech

    async def _speak(self) -> None:
        while True:
            item = await self._queue.get()
            if isinstance(item, _Flushed):
                await self._send(
                    {"type": "session.done", "utterance_index": item.utterance, "total_sentences": item.units}
                )
                if self._utterance is None and self._queue.empty():
                    self._pending = 0
            else:
                await self._speak_unit(item)
            self._busy -= 1
            self._queue.task_done()

    async def _speak_unit(self, unit: _Unit) -> None:
        frames = _Frames(self, unit)
        failed = False
        try:
            call = build_speech_call(unit.config, unit.text, unit.finished, self.context, self.socket)
            unit.handle = self.context.requests.submit(call)
            await self._relay(unit.handle, frames)
        except OmniError as error:
            failed = True
            await self._report(error, partial_audio=frames.bytes > 0)
        finally:
            if unit.handle is not None:
                unit.handle.cancel(CLIENT_DISCONNECT)
        await frames.done(failed)
        if unit.finished:
            self._pending = max(0, self._pending - len(unit.text))

    async def _relay(self, handle: RequestHandle, frames: _Frames) -> None:
        collected = Collected(keep_samples=not frames.unit.config.stream_audio)
        async for output in counted(handle.outputs(), self.context.speech_streams):
            collected.add(output)
            match output:
                case Emit(piece=AudioPiece() as piece) if piece.pcm and frames.unit.config.stream_audio:
                    try:
                        await frames.send(pcm16(piece.pcm), piece.sample_rate)
                    except TimeoutError:
                        handle.cancel(SLOW_CLIENT)
                        raise
        if not frames.unit.config.stream_audio:
            audio = await encode_whole(collected.pcm, collected.sample_rate, frames.unit.config.response_format)
            await frames.send(audio, collected.sample_rate)

    # --- sending

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises TimeoutError for a client that does not read."""
        async with asyncio.timeout(self.context.patience.send):
            await self.socket.send_text(msgspec.json.encode(message).decode())

    async def _send_bytes(self, data: bytes) -> None:
        async with asyncio.timeout(self.context.patience.send):
            await self.socket.send_bytes(data)

    async def _report(self, error: OmniError, partial_audio: bool = False) -> None:
        more = {"partial_audio": True, "action": "discard"} if partial_audio else {}
        await self._send({"type": "error", "message": str(error), "code": error.code, **more})


class _Frames:
    """The audio of one unit on the wire: audio.start, frames, audio.done."""

    def __init__(self, session: SpeechSession, unit: _Unit) -> None:
        self.unit = unit
        self.bytes = 0
        self._session = session
        self._started = False
        self._chunks = 0

    async def send(self, data: bytes, sample_rate: int) -> None:
        if not self._started:
            self._started = True
            await self._start(sample_rate)
        self.bytes += len(data)
        if self.unit.config.audio_encoding == "binary":
            await self._session._send_bytes(data)
            return
        await self._session._send(
            {
                "type": "audio.chunk",
                **self._where(),
                "chunk_id": self._chunks,
                "sample_rate": sample_rate,
                "audio_b64": base64.b64encode(data).decode("ascii"),
                "timestamps": None,
            }
        )
        self._chunks += 1

    async def _start(self, sample_rate: int) -> None:
        await self._session._send(
            {
                "type": "audio.start",
                **self._where(),
                "sentence_text": self.unit.text,
                "format": self.unit.config.response_format,
                "sample_rate": sample_rate,
            }
        )

    async def done(self, failed: bool) -> None:
        if not self._started and not failed:
            await self._start(0)
        await self._session._send({"type": "audio.done", **self._where(), "total_bytes": self.bytes, "error": failed})

    def _where(self) -> dict[str, int]:
        return {"utterance_index": self.unit.utterance, "sentence_index": self.unit.sentence}
