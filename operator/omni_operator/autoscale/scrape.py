"""Reads /metrics and /omni/status of a pipeline's entry, and /metrics of its stage pods. Thin: decides nothing.

Every failure means "no answer" and is for the window to judge. Answers are bounded in size and time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from omni_operator.autoscale.snapshot import WORK, Labels, Scrape, short_name
from omni_operator.resources.stage_pod import engine_port
from omni_runtime.deploy.plan import ENTRY_HTTP_PORT

TIMEOUT_SECONDS = 3.0
MAX_BODY_BYTES = 4 * 1024 * 1024
IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Target:
    """A ready pod. stages: those whose engines it runs, in the order of their ports; none: the entry."""

    pod: str
    uid: str
    address: str
    stages: tuple[str, ...] = ()


def samples(text: str) -> dict[str, dict[Labels, float]]:
    """Sample name without prefix -> labels -> value. Raises ValueError for what is no exposition format."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            found.setdefault(short_name(sample.name), {})[labels] = float(sample.value)
    return found


class Scraper:
    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(IN_FLIGHT)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape(self, entry: Target | None, pods: Iterable[Target], now: float) -> Scrape:
        """One moment of one pipeline; without an entry that answers it is blank."""
        if entry is None:
            return Scrape(now)
        ports = [(p, stage, engine_port(i)) for p in pods for i, stage in enumerate(p.stages)]
        text, status, *answers = await asyncio.gather(
            self.get(entry.address, ENTRY_HTTP_PORT, "/metrics"),
            self.get(entry.address, ENTRY_HTTP_PORT, "/omni/status"),
            *(self.get(p.address, port, "/metrics") for p, _, port in ports),
        )
        parsed = _parse(text)
        if parsed is None:
            return Scrape(now)
        work: dict[str, dict[str, float]] = {}
        missing = [] if status is not None else [entry.pod]
        for (pod, stage, _), answer in zip(ports, answers, strict=True):
            families = _parse(answer)
            if families is None:
                missing.append(pod.pod)
                continue
            units = (sum(families.get(name, {}).values()) for name in WORK)
            work.setdefault(stage, {})[pod.pod] = next((u for u in units if u > 0), 0.0)
        return Scrape(now, parsed, held_of(status), work, entry.uid, tuple(missing))

    async def get(self, address: str, port: int, path: str) -> str | None:
        """None: no answer, or one that is too long."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        host = f"[{address}]" if ":" in address else address
        async with self._places:
            try:
                async with self._session.get(f"http://{host}:{port}{path}") as response:
                    if response.status != 200:
                        return None
                    body = bytearray()
                    async for chunk in response.content.iter_any():  # read(n) gives what has come, not n
                        body += chunk
                        if len(body) > MAX_BODY_BYTES:
                            return None
                    return body.decode()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                return None


def _parse(text: str | None) -> dict[str, dict[Labels, float]] | None:
    if text is None:
        return None
    try:
        return samples(text)
    except ValueError:
        return None


def held_of(status: str | None) -> Mapping[str, Mapping[str, int]]:
    """Requests bound to each replica, from /omni/status; replicas that are not live still hold what they drain."""
    try:
        body: Any = json.loads(status or "{}")
        return {
            str(s["name"]): {str(r["replica"]): int(r["bound"]) for r in s.get("replicas", ())}
            for s in body.get("stages", ())
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
