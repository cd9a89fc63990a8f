"""Keeps the processes of a plan running: start, readiness, restart with backoff, orderly stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from omni_runtime.errors import DeadlineExceeded, OmniError
from omni_runtime.local.layout import ProcessSpec
from omni_runtime.local.process import Child

READY_POLL_SECONDS = 0.25
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
STABLE_SECONDS = 60.0  # a process that ran so long starts again without backoff
EARLY_CRASHES = 3  # a process that never got ready and ended so often will not get ready
STOP_SECONDS = (12.0, 25.0, 6.0)  # by stop order: entry, engines, connector


class ProcessFailed(OmniError):
    """A process ended and starting it again is pointless."""

    code = "ProcessFailed"


@dataclass(frozen=True, slots=True)
class Report:
    """What the user should see now."""

    text: str
    lines: tuple[str, ...] = ()  # a log's tail
    warning: bool = False


Tell = Callable[[Report], None]


class Supervisor:
    """All processes of one plan. `run` until `stop` is set or a process cannot be kept running."""

    def __init__(self, specs: Sequence[ProcessSpec], logs: Path, environment: dict[str, str], tell: Tell) -> None:
        self._specs = tuple(specs)
        self._logs = logs
        self._environment = environment
        self._tell = tell
        self._children: dict[str, Child] = {}
        self._ready: set[str] = set()
        self._waiting_for: dict[str, str] = {s.name: "starting" for s in specs}
        self._stopping = False
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[None]] = []

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Start everything and wait until everything is ready.

        Raises DeadlineExceeded with what was still missing, ProcessFailed with the name of a process that gives up.
        """
        for spec in self._specs:
            self._keepers.append(asyncio.create_task(self._keep(spec)))
        await self._until_ready()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises ProcessFailed."""
        stopped = asyncio.create_task(stop.wait())
        both: set[asyncio.Future[object]] = {stopped, self._failed}  # type: ignore[arg-type]  # invariance only
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._failed.done():
            raise ProcessFailed(self._failed.result())

    async def stop(self, hurry: asyncio.Event) -> None:
        """Entry, engines, connector, in this order; each gets its grace unless `hurry` is set."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for order, grace in enumerate(STOP_SECONDS):
            group = [c for c in self._children.values() if c.spec.order == order]
            killer = asyncio.create_task(self._kill_when(hurry))
            endings = await asyncio.gather(*(c.end(grace) for c in group))
            killer.cancel()
            for child, clean in zip(group, endings, strict=True):
                if not clean and not hurry.is_set():
                    self._tell(
                        Report(f"{child.spec.name} did not end within {grace:.0f} s and was killed", warning=True)
                    )

    async def _kill_when(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        for child in self._children.values():
            child.kill_group()

    # --- one process

    async def _keep(self, spec: ProcessSpec) -> None:
        crashes, failures = 0, 0
        while True:
            started = time.monotonic()
            child = await Child.start(spec, self.log_of(spec.name), self._environment)
            self._children[spec.name] = child
            self._waiting_for[spec.name] = "starting"
            watcher = asyncio.create_task(self._watch(spec))
            try:
                code = await child.wait()
            finally:
                watcher.cancel()
            await child.end_group()  # what it may have left behind
            was_ready = spec.name in self._ready
            self._ready.discard(spec.name)
            crashes = 0 if time.monotonic() - started > STABLE_SECONDS else crashes + 1
            failures = 0 if was_ready else failures + 1
            pause = BACKOFF_SECONDS[min(max(0, crashes - 1), len(BACKOFF_SECONDS) - 1)]
            giving_up = failures >= EARLY_CRASHES
            fate = "giving up" if giving_up else f"starting it again in {pause:.0f} s"
            tail = tuple(child.log_tail())
            self._tell(Report(f"{spec.name} ended ({_ending(code)}); {fate}; log: {child.log}", tail, warning=True))
            if giving_up:
                if not self._failed.done():
                    self._failed.set_result(
                        f"{spec.name} ended {failures} times before it was ready ({_ending(code)}); log: {child.log}"
                    )
                return
            self._waiting_for[spec.name] = f"starts again in {pause:.0f} s"
            await asyncio.sleep(pause)

    async def _watch(self, spec: ProcessSpec) -> None:
        """Ask until it is ready; remember what it says it waits for."""
        async with httpx.AsyncClient(timeout=2.0) as http:
            while True:
                reason = await _ready(http, spec.ready_url)
                if reason is None:
                    if spec.name not in self._ready and self._keepers and not self._stopping:
                        self._tell(Report(f"{spec.name} is ready"))
                    self._ready.add(spec.name)
                    self._waiting_for.pop(spec.name, None)
                    return
                self._waiting_for[spec.name] = reason
                await asyncio.sleep(READY_POLL_SECONDS)

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + max(s.startup_seconds for s in self._specs)
        shown = ""
        while len(self._ready) < len(self._specs):
            if self._failed.done():
                raise ProcessFailed(self._failed.result())
            waiting = "; ".join(f"{name}: {why}" for name, why in self._waiting_for.items())
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"not ready in time; still waiting for {waiting}; logs: {self._logs}")
            if waiting != shown:
                self._tell(Report(f"waiting for {waiting}"))
                shown = waiting
            await asyncio.sleep(READY_POLL_SECONDS)


async def _ready(http: httpx.AsyncClient, url: str) -> str | None:
    """None: ready. Otherwise what is missing, in the process's own words where it has some."""
    try:
        response = await http.get(url)
    except httpx.TimeoutException:
        return "busy, does not answer its probe"
    except httpx.HTTPError:
        return "starting"
    if response.status_code == 200:
        return None
    return " ".join(response.text.split())[:160] or f"HTTP {response.status_code}"


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def child_environment() -> dict[str, str]:
    """Ours, with unbuffered output. Threads of numerical libraries are set by each process for itself."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
