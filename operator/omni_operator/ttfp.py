"""TTFP p95 of a pipeline, asked from its entry. Optional: every failure means "not known", and is not asked again soon."""

from __future__ import annotations

import time
from collections.abc import Callable

import aiohttp

from omni_operator.names import ENTRY_STAGE
from omni_operator.observed import Key, Live
from omni_operator.plan.pods import is_ready
from omni_runtime.deploy.plan import ENTRY_HTTP_PORT

TIMEOUT_SECONDS = 1.0
FRESH_SECONDS = 30.0
FAILED_SECONDS = 120.0  # an operator outside the pod network must not lose a second in each reconcile
MAX_BODY_BYTES = 64 * 1024


class EntryStatusReader:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._known: dict[Key, tuple[float, int | None]] = {}  # valid until, value
        self._session: aiohttp.ClientSession | None = None

    async def ttfp(self, key: Key, pods: tuple[Live, ...]) -> int | None:
        """Milliseconds, or None."""
        entry = next((p for p in pods if p.stage == ENTRY_STAGE and is_ready(p) and p.status.get("podIP")), None)
        if entry is None:
            return None
        until, value = self._known.get(key, (0.0, None))
        if self._monotonic() < until:
            return value
        value = await self._read(str(entry.status["podIP"]))
        self._known[key] = (self._monotonic() + (FAILED_SECONDS if value is None else FRESH_SECONDS), value)
        return value

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _read(self, address: str) -> int | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{ENTRY_HTTP_PORT}/omni/status") as response:
                if response.status != 200 or (response.content_length or 0) > MAX_BODY_BYTES:
                    return None
                value = (await response.json()).get("ttfpMillisecondsP95")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            return None
        return int(value) if isinstance(value, int | float) and 0 <= value < 3_600_000 else None
