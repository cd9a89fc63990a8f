"""The engine thread: every call of an engine happens here, in one thread, in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omni_runtime.errors import OmniError
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.engine import (
    EngineStats,
    Failed,
    PacedEngine,
    SleepingEngine,
    StageEngine,
    StageOutput,
    StageRequest,
)

POLL_SECONDS = 0.5  # upper bound of one blocking poll; `wake` ends it early


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    pass


@dataclass(frozen=True, slots=True)
class EngineStopped:
    """The engine has let go of an aborted request."""

    request: str


@dataclass(frozen=True, slots=True)
class EngineDied:
    reason: str


@dataclass(frozen=True, slots=True)
class EnginePower:
    """Asleep or awake now; `problem`: why it is not what was asked for."""

    asleep: bool
    problem: str = ""


RunnerEvent = StageOutput | EngineLoaded | EngineStopped | EngineDied | EnginePower


class EngineRunner:
    """Owns one engine and its thread; `deliver` is called in that thread with what came out."""

    def __init__(self, engine: StageEngine, deliver: Callable[[Sequence[RunnerEvent]], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox: deque[Callable[[], Sequence[RunnerEvent]]] = deque()
        self._closing = threading.Event()
        self._posted = threading.Event()  # ends the wait of an engine that sleeps: that one is not polled
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats = EngineStats(waiting=0, running=0, capacity=0)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: StageRequest) -> None:
        self._post(lambda: self._guarded(request.request, lambda: self._engine.submit(request)))

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        self._post(lambda: self._guarded(request, lambda: self._engine.feed(request, edge, payload)))

    def taken(self, request: str, edge: str, waiting: int) -> None:
        """What a producer of adaptive chunks hears of its consumer; others do not care."""

        def tell() -> Sequence[RunnerEvent]:
            if isinstance(self._engine, PacedEngine):
                self._engine.taken(request, edge, waiting)
            return ()

        self._post(tell)

    def abort(self, request: str) -> None:
        """`EngineStopped` follows, whether or not the engine knew the request."""

        def stop() -> Sequence[RunnerEvent]:
            self._engine.abort(request)
            return (EngineStopped(request),)

        self._post(stop)

    def sleep(self) -> None:
        """`EnginePower` follows."""
        self._post(lambda: self._change_power(asleep=True))

    def wake_up(self) -> None:
        """`EnginePower` follows."""
        self._post(lambda: self._change_power(asleep=False))

    def _change_power(self, *, asleep: bool) -> Sequence[RunnerEvent]:
        if asleep is self._asleep:
            return (EnginePower(asleep),)
        if not isinstance(self._engine, SleepingEngine):
            return (EnginePower(self._asleep, f"{type(self._engine).__name__} has nothing that sleep would give back"),)
        try:
            if asleep:
                self._engine.sleep()
            else:
                self._engine.wake_up()
        except OmniError as error:
            return (EnginePower(self._asleep, f"{error.code}: {error}"),)
        self._asleep = asleep
        return (EnginePower(asleep),)

    def close(self, timeout_s: float) -> bool:
        """Stop the thread and close the engine; False if the engine did not return in time."""
        self._closing.set()
        self._posted.set()
        self._engine.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, call: Callable[[], Sequence[RunnerEvent]]) -> None:
        self._inbox.append(call)
        self._posted.set()
        self._engine.wake()

    def _guarded(self, request: str, call: Callable[[], None]) -> Sequence[RunnerEvent]:
        """One request's bad input is that request's failure, never the engine's."""
        try:
            call()
        except OmniError as error:
            return (Failed(request, error.code, str(error)),)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises for one request stays with it (R34)
            return (Failed(request, "EngineError", f"{type(error).__name__}: {error}"),)
        return ()

    def _run(self) -> None:
        try:
            self._engine.load()
            self._deliver((EngineLoaded(),))
            while not self._closing.is_set():
                while self._inbox:
                    if events := self._inbox.popleft()():
                        self._deliver(events)
                if self._asleep:
                    self._posted.wait(POLL_SECONDS)
                    self._posted.clear()
                    continue
                outputs = self._engine.poll(0.0 if self._inbox else POLL_SECONDS)
                self.stats = self._engine.stats()
                if outputs:
                    self._deliver(outputs)
                if problem := self._engine.health():
                    self._deliver((EngineDied(problem),))
                    return
        except Exception as error:  # noqa: BLE001 - reported, and the process ends (R8)
            self._deliver((EngineDied(f"{type(error).__name__}: {error}"),))
        finally:
            self._engine.close()
