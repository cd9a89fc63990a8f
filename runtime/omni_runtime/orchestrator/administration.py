"""Pause, resume, sleep and wake: what an administrator does to a whole pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_runtime.errors import Conflict
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.power import PowerSwitch, ReplicaPower

log = get_logger(__name__)


class Administration:
    """`paused`: nothing is admitted; what runs goes on, what waits keeps its place and its deadline."""

    def __init__(self, power: PowerSwitch, admit: Callable[[], None]) -> None:
        self._power = power
        self._admit = admit
        self._running = 0
        self._still = asyncio.Event()  # no request is with any replica
        self._still.set()
        self.paused = False

    def note(self, running: int) -> None:
        """How many requests are with replicas now."""
        self._running = running
        if running:
            self._still.clear()
        else:
            self._still.set()

    def pause(self) -> None:
        if not self.paused:
            log.info("orchestrator.paused", running=self._running)
        self.paused = True

    def resume(self) -> None:
        """Raises Conflict while replicas sleep: they must be woken up instead."""
        if asleep := self._power.asleep():
            names = ", ".join(f"{stage}/{replica}" for stage, replica in asleep)
            raise Conflict(f"resume: {len(asleep)} replicas sleep ({names}); use wakeup")
        if self.paused:
            log.info("orchestrator.resumed", running=self._running)
        self.paused = False
        self._admit()

    async def sleep(self, seconds: float) -> tuple[ReplicaPower, ...]:
        """Pause, wait for what runs, then ask every replica to give its memory back.

        The pipeline stays paused, also if some replicas could not sleep; if none could, it is as before. Raises
        Conflict, and all is as before, if requests still run after `seconds`.
        """
        was_paused = self.paused
        self.pause()
        try:
            await asyncio.wait_for(self._still.wait(), seconds)
        except TimeoutError:
            if not was_paused:
                self.resume()
            raise Conflict(
                f"sleep: {self._running} requests still run after {seconds:g} s; "
                "ask again later, or with a larger timeout_seconds"
            ) from None
        changed = await self._power.change(asleep=True, seconds=seconds)
        if not was_paused and not self._power.asleep():
            self.resume()
        return changed

    async def wake_up(self, seconds: float) -> tuple[ReplicaPower, ...]:
        """Wake every replica; resume if none is left asleep."""
        changed = await self._power.change(asleep=False, seconds=seconds)
        if not self._power.asleep():
            self.resume()
        return changed
