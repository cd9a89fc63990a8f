"""The work queue: one slot per pipeline, one worker at a time per slot, exponential backoff with jitter.

An event that arrives while its pipeline is being reconciled is remembered and handled afterwards: nothing is lost and
nothing runs twice at once. Watches may lie and miss (a relist does not report what vanished in between), so a full list
from time to time puts every pipeline in again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from omni_operator import metrics
from omni_operator.observed import Key

BACKOFF_BASE_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 300.0


def backoff_seconds(failures: int, jitter: Callable[[], float] = random.random) -> float:
    """Delay before try number `failures` + 1: doubles from half a second to five minutes, between 50 and 100 % of it."""
    whole = min(BACKOFF_MAX_SECONDS, BACKOFF_BASE_SECONDS * 2.0 ** min(max(0, failures - 1), 20))
    return whole * (0.5 + 0.5 * jitter())


@dataclass(frozen=True, slots=True)
class Item:
    key: Key
    since: float  # loop time of the first event that this reconcile will handle


class WorkQueue:
    """Not thread-safe; lives in one event loop."""

    def __init__(self) -> None:
        self._ready: dict[Key, float] = {}  # in order; value: when the first event came
        self._delayed: dict[Key, tuple[float, asyncio.TimerHandle, float]] = {}  # due, timer, first event
        self._active: set[Key] = set()
        self._again: dict[Key, tuple[float, float]] = {}  # while active: due, first event
        self._failures: dict[Key, int] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Ask for a reconcile after `delay` seconds; an earlier request for the same key wins."""
        now = asyncio.get_running_loop().time()
        self._add(key, now + delay, now)

    def _add(self, key: Key, due: float, since: float) -> None:
        loop = asyncio.get_running_loop()
        if key in self._active:
            old = self._again.get(key)
            self._again[key] = (due, since) if old is None else (min(due, old[0]), min(since, old[1]))
            return
        if key in self._ready:
            return
        pending = self._delayed.get(key)
        if pending is not None:
            since = min(since, pending[2])
            if pending[0] <= due:
                self._delayed[key] = (pending[0], pending[1], since)
                return
            pending[1].cancel()
            del self._delayed[key]
        if due <= loop.time():
            self._make_ready(key, since)
        else:
            self._delayed[key] = (due, loop.call_at(due, self._due, key), since)

    def _due(self, key: Key) -> None:
        pending = self._delayed.pop(key, None)
        if pending is not None:
            self._make_ready(key, pending[2])

    def _make_ready(self, key: Key, since: float) -> None:
        self._ready[key] = since
        self._measure()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
                break

    async def get(self) -> Item:
        """The next pipeline to reconcile; it is active until `done`."""
        while not self._ready:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        key = next(iter(self._ready))
        since = self._ready.pop(key)
        self._active.add(key)
        self._measure()
        return Item(key, since)

    def done(self, key: Key, *, retry: bool = False, requeue_after: float | None = None) -> None:
        """The reconcile ended: well (failures are forgotten), or to be retried with backoff."""
        self._active.discard(key)
        now = asyncio.get_running_loop().time()
        if retry:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            due = now + backoff_seconds(failures)
            self._add(key, due, due)
        else:
            self._failures.pop(key, None)
            if requeue_after is not None:
                self._add(key, now + requeue_after, now + requeue_after)
        again = self._again.pop(key, None)
        if again is not None:
            # After a failure, fresh events may come at once but not faster than the first backoff step.
            due = max(again[0], now + BACKOFF_BASE_SECONDS) if retry else again[0]
            self._add(key, due, again[1])

    @property
    def depth(self) -> int:
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs (delayed requests do not count)."""
        return not self._ready and not self._active

    def oldest_seconds(self) -> float:
        now = asyncio.get_running_loop().time()
        return max((now - since for since in self._ready.values()), default=0.0)

    def known(self) -> frozenset[Key]:
        return frozenset({*self._ready, *self._delayed, *self._active})

    def _measure(self) -> None:
        metrics.QUEUE_DEPTH.set(len(self._ready))
        metrics.QUEUE_OLDEST_SECONDS.set(self.oldest_seconds())


async def resync_forever(
    queue: WorkQueue,
    list_keys: Callable[[], Awaitable[Iterable[Key]]],
    remembered: Callable[[], Iterable[Key]],
    *,
    period: float,
    on_error: Callable[[Exception], None],
) -> None:
    """Put every pipeline in again, every `period` seconds (10 % jitter), spread over a tenth of it.

    What we remember but the list does not show has vanished without an event: it is put in, too.
    """
    while True:
        await asyncio.sleep(period * random.uniform(0.9, 1.1))
        try:
            present = set(await list_keys())
        except Exception as error:  # noqa: BLE001 - the next period tries again
            on_error(error)
            continue
        for key in present | set(remembered()):
            queue.add(key, random.uniform(0, period / 10))
