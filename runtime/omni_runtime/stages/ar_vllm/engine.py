"""The thinker on vLLM's AsyncLLM: text deltas for the client, speech segments or hidden-state rows for the next stage.

vLLM's asyncio loop lives in the engine thread and runs inside `poll`; its engine core and workers are processes of
their own, so generation goes on between polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, Metric

from omni_runtime.errors import EngineError, InvalidRequest, OmniError
from omni_runtime.eventloop import new_loop
from omni_runtime.models.chat import ChatFamily, ChatPrompt, characters_of, chat_family, detokenize, tokenize
from omni_runtime.protocol.payload import Payload
from omni_runtime.serving.params import StageParams, from_map
from omni_runtime.stages.ar_vllm.arguments import Tap, apply_environment, choose_tap, engine_arguments, environment
from omni_runtime.stages.ar_vllm.rows import RowAssembler, decode_header, vllm_request_id
from omni_runtime.stages.ar_vllm.segments import SpeechSegmenter
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import (
    Done,
    EdgeOut,
    EngineStats,
    Failed,
    StageOutput,
    StageRequest,
    Started,
    TextOut,
)
from omni_runtime.topology.types import PayloadContract

SHUTDOWN_SECONDS = 15.0  # killed earlier, the engine core leaves its message queue (160 MiB) in /dev/shm
SHORT_CHARACTERS = 4000  # about half a millisecond of a tokenizer's work
ROWS_DEADLINE_S = 30.0  # the last rows come from another process; they are milliseconds behind the last token
_INPUTS = ("messages", "prompt", "tokenize", "detokenize")  # of `Submit.inputs`; one of them
LAYERS_PATHS = ("language_model.model.layers", "model.layers")


@dataclass(slots=True, eq=False)
class _Segments:
    """Text segments edge: phrases as UTF-8 rows. whole: none of them leaves before the last one."""

    edge: str
    whole: bool
    segmenter: SpeechSegmenter = field(default_factory=SpeechSegmenter)
    position: int = 0
    ready: list[StageOutput] = field(default_factory=list)

    def push(self, request: str, delta: str) -> list[StageOutput]:
        self.ready += [self._out(request, phrase) for phrase in self.segmenter.push(delta)]
        return [] if self.whole else self._take()

    def finish(self, request: str) -> list[StageOutput]:
        self.ready += [self._out(request, phrase) for phrase in self.segmenter.flush()]
        self.ready.append(EdgeOut(request, self.edge, Payload(start=self.position, rows=0, finished=True)))
        return self._take()

    def _take(self) -> list[StageOutput]:
        outputs, self.ready = self.ready, []
        return outputs

    def _out(self, request: str, phrase: str) -> StageOutput:
        utf8 = np.frombuffer(phrase.encode(), dtype=np.uint8)
        payload = Payload(start=self.position, rows=len(utf8), finished=False, tensors={"utf8": utf8})
        self.position += len(utf8)
        return EdgeOut(request, self.edge, payload)


@dataclass(slots=True, eq=False)
class _Rows:
    """Hidden-state edge."""

    edge: str
    whole: bool
    assembler: RowAssembler
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    failure: EngineError | None = None

    def advance(self, request: str) -> list[StageOutput]:
        if self.whole and not self.assembler.complete:
            return []
        payload = self.assembler.take()
        if payload is None:
            return []
        if payload.finished:
            self.complete.set()
        return [EdgeOut(request, self.edge, payload)]


class ArVllmEngine:
    """One vLLM engine; as many requests at once as the stage's concurrency."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        options = context.options()
        cpu = os.environ.get("OMP_NUM_THREADS", "1")
        self._threads = options.integer("threads", int(cpu), minimum=1)
        self._default_seed = options.text("seed", "")
        self._edge = context.outputs[0] if context.outputs else None
        self._tapped = self._edge is not None and self._edge.payload is PayloadContract.THINKER_HIDDEN
        asked = options.choice("tap", Tap.AUTO, tuple(Tap))
        self._tap = choose_tap(context, asked, options.remaining()) if self._tapped else None
        self._whole = self._edge is not None and self._edge.mode == "fullPayload"
        self._arguments = engine_arguments(context, options.remaining(), tap=self._tap)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rows: dict[str, _Rows] = {}
        self._outputs: deque[StageOutput] = deque()
        self._problem: str | None = None
        self._llm: Any = None
        self._chat: ChatFamily | None = None
        self._tap_socket: Any = None
        self._tap_folder: tempfile.TemporaryDirectory[str] | None = None
        self._loop = new_loop()  # runs in the engine thread, inside `load` and `poll`
        self._changed = asyncio.Event()

    # --- StageEngine

    def load(self) -> None:
        apply_environment(environment(self._context, self._threads, tapped=self._tapped))
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._load())

    def submit(self, request: StageRequest) -> None:
        params = from_map(request.params)
        if not any(request.inputs.get(kind) for kind in _INPUTS):
            raise InvalidRequest("messages: is empty; send at least one message")
        task = self._loop.create_task(self._generate(request, params))
        self._tasks[request.request] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.request, None))

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        raise EngineError(f"the thinker takes no input on edge {edge!r}")

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        self._loop.run_until_complete(self._wait(timeout_s))
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def abort(self, request: str) -> None:
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task], timeout=10.0))
        self._outputs = deque(o for o in self._outputs if o.request != request)

    def health(self) -> str | None:
        if self._llm is not None and self._llm.errored:
            return f"vLLM's engine process failed: {self._llm.dead_error}"
        return self._problem

    def sleep(self) -> None:
        self._check_sleep_mode()
        self._loop.run_until_complete(self._llm.sleep(level=1))

    def wake_up(self) -> None:
        self._check_sleep_mode()
        self._loop.run_until_complete(self._llm.wake_up())

    def _check_sleep_mode(self) -> None:
        if self._context.stage.device.resource_name is None:
            raise EngineError("a CPU stage has no device memory to give back; scale it down instead")
        if not self._arguments.get("enable_sleep_mode"):
            raise EngineError("vLLM was started without sleep mode; set engineArgs.enable_sleep_mode to true")

    def families(self) -> Iterable[Metric]:
        """vLLM registers its own in the process's default registry: running, waiting, KV cache, preemptions, ..."""
        return tuple(f for f in REGISTRY.collect() if f.name.startswith("vllm:"))

    def stats(self) -> EngineStats:
        return EngineStats(waiting=0, running=len(self._tasks), capacity=self._context.stage.max_concurrency)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
        if self._tap_socket is not None:
            self._tap_socket.close(linger=0)
        if self._tap_folder is not None:
            self._tap_folder.cleanup()
        if self._loop.is_running() or self._loop.is_closed():
            return
        left = asyncio.all_tasks(self._loop)  # vLLM's own readers among them
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=5.0))
        self._loop.close()

    # --- inside the loop

    async def _load(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            arguments = AsyncEngineArgs(**self._arguments)
        except TypeError as error:
            raise EngineError(f"engineArgs: vLLM does not take them: {error}") from error
        options = self._arguments.get("mm_processor_kwargs")
        self._chat = chat_family(self._context.plan.topology, self._context.model_path, options)
        self._llm = AsyncLLM.from_engine_args(arguments)
        if self._tapped:
            await self._install_tap()

    async def _install_tap(self) -> None:
        import zmq
        import zmq.asyncio

        self._tap_folder = tempfile.TemporaryDirectory(prefix="omni-tap-")
        endpoint = f"ipc://{Path(self._tap_folder.name) / 'rows.sock'}"
        self._tap_socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._tap_socket.setsockopt(zmq.RCVHWM, 0)
        self._tap_socket.bind(endpoint)
        hf_config: Any = self._llm.vllm_config.model_config.hf_config
        talker = getattr(hf_config, "talker_config", None)
        if talker is None:
            raise EngineError("the model's configuration has no talker_config: it cannot feed a talker")
        path = await self._layers_path()
        await self._llm.collective_rpc(
            "install_tap", args=(path, int(talker.accept_hidden_layer), endpoint, self._tap is Tap.AUX)
        )
        self._tap_task = asyncio.create_task(self._receive_rows())
        self._tap_task.add_done_callback(self._tap_ended)

    async def _layers_path(self) -> str:
        model = type(self._llm).__name__  # the model lives in the worker; only its architecture is known here
        architectures = self._llm.vllm_config.model_config.architectures or [model]
        return LAYERS_PATHS[0] if "ForConditionalGeneration" in architectures[0] else LAYERS_PATHS[1]

    async def _receive_rows(self) -> None:
        while True:
            frames = await self._tap_socket.recv_multipart(copy=False)
            header = decode_header(frames[0].buffer)
            rows = self._rows.get(header.request)
            if rows is None:
                continue  # aborted, or failed: late rows have no owner
            try:
                rows.assembler.add_rows(header, *(f.buffer for f in frames[1:]))
                self._emit(rows.advance(header.request))
            except (EngineError, TypeError) as error:
                rows.failure = EngineError(str(error))
                rows.complete.set()

    def _tap_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._problem = f"the hidden-state tap ended: {task.exception()}"
            self._changed.set()

    async def _wait(self, timeout_s: float) -> None:
        if self._outputs:
            await asyncio.sleep(0)  # one turn for whatever is ready
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def _emit(self, outputs: Sequence[StageOutput]) -> None:
        if outputs:
            self._outputs.extend(outputs)
            self._changed.set()

    async def _generate(self, request: StageRequest, params: StageParams) -> None:
        name = request.request
        try:
            if "tokenize" in request.inputs or "detokenize" in request.inputs:
                self._emit(await asyncio.to_thread(self._translate, request))
            else:
                self._emit(await self._answer(request, params))
        except OmniError as error:
            self._emit([Failed(name, error.code, str(error))])
        except Exception as error:  # noqa: BLE001 - one request's failure stays one request's failure
            self._emit([self._failed(name, error)])
        finally:
            self._rows.pop(name, None)

    @staticmethod
    def _failed(request: str, error: Exception) -> Failed:
        """vLLM's own checks of a request (prompt length, sampling values, media) are the client's to fix."""
        from vllm.exceptions import VLLMValidationError

        if isinstance(error, ValueError | VLLMValidationError):
            return Failed(request, InvalidRequest.code, str(error))
        return Failed(request, EngineError.code, f"{type(error).__name__}: {error}")

    def _translate(self, request: StageRequest) -> Sequence[StageOutput]:
        """Between text and token ids: the tokenizer's work alone. In a thread."""
        assert self._chat is not None
        name = request.request
        if (asked := request.inputs.get("tokenize")) is not None:
            ids = tuple(tokenize(self._chat, asked))
            return [Started(name), TextOut(name, "", ids), Done(name, "stop", prompt_tokens=len(ids))]
        text = detokenize(self._chat, request.inputs["detokenize"])
        return [Started(name), TextOut(name, text), Done(name, "stop")]

    async def _answer(self, request: StageRequest, params: StageParams) -> Sequence[StageOutput]:
        """Stream the answer out; returns the last outputs, Done among them."""
        name = request.request
        chat = await self._prompt_of(request.inputs)
        wanted = self._edge is not None and self._edge.name in request.downstream_edges
        segments = _Segments(self._edge.name, self._whole) if self._edge and wanted and not self._tapped else None
        rows = None
        if self._edge and wanted and self._tapped:
            rows = self._rows[name] = _Rows(self._edge.name, self._whole, RowAssembler(first_meta=dict(chat.row_meta)))
        prompt_tokens = completion_tokens = 0
        finish = "stop"
        sampling = self._sampling(params)
        # Told at the first wait of `generate`, when vLLM's core has the request: before that it would only hold it up.
        telling = self._loop.call_soon(self._emit, [Started(name)])
        try:
            async for output in self._llm.generate(
                chat.prompt, sampling, vllm_request_id(name, tapped=rows is not None)
            ):
                completion = output.outputs[0]
                ids = [int(t) for t in completion.token_ids]
                prompt_tokens = len(output.prompt_token_ids or ())
                completion_tokens += len(ids)
                if completion.text or ids:
                    self._emit([TextOut(name, completion.text, tuple(ids) if params.return_token_ids else ())])
                if segments is not None:
                    self._emit(segments.push(name, completion.text))
                if rows is not None:
                    rows.assembler.add_tokens(output.prompt_token_ids, ids)
                    self._emit(rows.advance(name))
                if output.finished:
                    finish = completion.finish_reason or "stop"
        finally:
            telling.cancel()  # of a request that failed before it began
        if segments is not None:
            self._emit(segments.finish(name))
        if rows is not None:
            await self._finish_rows(name, rows)
        return [Done(name, finish, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)]

    async def _prompt_of(self, inputs: Mapping[str, Any]) -> ChatPrompt:
        """A short text is read here and now, in less time than another thread would need to begin."""
        assert self._chat is not None
        read: Callable[[], ChatPrompt]
        if "prompt" in inputs:
            read = partial(self._chat.completion, inputs["prompt"])
        else:
            read = partial(self._chat.prompt, tuple(inputs["messages"]))
        return read() if characters_of(inputs) <= SHORT_CHARACTERS else await asyncio.to_thread(read)

    async def _finish_rows(self, name: str, rows: _Rows) -> None:
        rows.assembler.finish()
        self._emit(rows.advance(name))
        try:
            await asyncio.wait_for(rows.complete.wait(), ROWS_DEADLINE_S)
        except TimeoutError:
            missing = rows.assembler.missing_rows
            raise EngineError(f"{missing} hidden-state rows did not arrive within {ROWS_DEADLINE_S:.0f} s") from None
        if rows.failure is not None:
            raise rows.failure

    def _sampling(self, params: StageParams) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seed = params.seed if params.seed is not None else (int(self._default_seed) if self._default_seed else None)
        return SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            stop=list(params.stop) or None,
            seed=seed,
            ignore_eos=params.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
