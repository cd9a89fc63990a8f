"""TTFP p95 of each pipeline, asked from its entry now and then; a change worth showing asks for a reconcile.

Optional: every failure means "not known". A reconcile itself asks nobody, so that an operator outside the pod network
loses no time in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from omni_operator.names import ENTRY_STAGE
from omni_operator.observed import Key, Live
from omni_operator.plan.pods import is_ready
from omni_operator.plan.status import settled_ttfp
from omni_runtime.deploy.plan import ENTRY_HTTP_PORT

PERIOD_SECONDS = 10.0
TIMEOUT_SECONDS = 2.0
IN_FLIGHT = 16
MAX_BODY_BYTES = 64 * 1024


class EntryStatusReader:
    """Knows where the ready entries are from the reconciles, and what each said last."""

    def __init__(self) -> None:
        self._addresses: dict[Key, str] = {}
        self._known: dict[Key, int | None] = {}
        self._shown: dict[Key, int | None] = {}
        self._session: aiohttp.ClientSession | None = None

    async def ttfp(self, key: Key, pods: tuple[Live, ...]) -> int | None:
        """Milliseconds as the entry last said, or None."""
        entry = next((p for p in pods if p.stage == ENTRY_STAGE and is_ready(p) and p.status.get("podIP")), None)
        if entry is None:
            self.forget(key)
            return None
        self._addresses[key] = str(entry.status["podIP"])
        value = self._known.get(key)
        self._shown[key] = settled_ttfp(self._shown.get(key), value)
        return value

    def forget(self, key: Key) -> None:
        for known in (self._addresses, self._known, self._shown):
            known.pop(key, None)

    async def refresh(self) -> tuple[Key, ...]:
        """Ask every entry once. Returns the pipelines whose status shows something else than what they say now."""
        places = asyncio.Semaphore(IN_FLIGHT)

        async def ask(key: Key, address: str) -> Key | None:
            async with places:
                value = await self._read(address)
            if value is None or self._addresses.get(key) != address:
                return None
            self._known[key] = value
            shown = self._shown.get(key)
            return key if settled_ttfp(shown, value) != shown else None

        asked = await asyncio.gather(*(ask(key, address) for key, address in tuple(self._addresses.items())))
        return tuple(key for key in asked if key is not None)

    async def refresh_forever(self, enqueue: Callable[[Key], None]) -> None:
        """Runs beside the workers until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            for key in await self.refresh():
                enqueue(key)

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
