"""Two ways to load a server. Closed loop: N clients, each sends its next request when the last one is answered. Open
loop: requests leave at planned moments whatever the server does, as users do; only it shows what a queue costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks._client import Timeline, send_chat


@dataclass(frozen=True, slots=True)
class Request:
    """kind: a label for the figures; body: of the chat completion, `stream` included."""

    kind: str
    body: dict[str, Any]


NOT_SENT = "not sent before the deadline of the run"


async def closed_loop(
    http: aiohttp.ClientSession, url: str, requests: Sequence[Request], *, concurrency: int, deadline_s: float
) -> list[Timeline]:
    """All requests, at most `concurrency` at a time. After `deadline_s` nothing new is sent and what runs is cut off."""
    end = time.perf_counter() + deadline_s
    left = iter(requests)
    timelines: list[Timeline] = []

    async def client() -> None:
        for request in left:  # one iterator for all clients: each request is sent once
            remaining = end - time.perf_counter()
            if remaining <= 0:
                timelines.append(_not_sent(request))
                continue
            timelines.append(await send_chat(http, url, request.body, kind=request.kind, timeout_s=remaining))

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, min(concurrency, len(requests)))):
            group.create_task(client())
    return timelines


async def open_loop(
    http: aiohttp.ClientSession,
    url: str,
    requests: Iterable[Request],
    arrivals: Iterable[float],
    *,
    deadline_s: float,
) -> list[Timeline]:
    """Request i leaves `arrivals[i]` seconds after the start; ends at the shorter of the two sequences."""
    start = time.perf_counter()
    end = start + deadline_s
    timelines: list[Timeline] = []

    async def one(request: Request, planned: float) -> None:
        now = time.perf_counter()
        late = now - planned
        timelines.append(
            await send_chat(http, url, request.body, kind=request.kind, late_s=late, timeout_s=max(0.001, end - now))
        )

    async with asyncio.TaskGroup() as group:
        for request, arrival in zip(requests, arrivals, strict=False):
            planned = start + arrival
            if planned >= end:
                timelines.append(_not_sent(request))
                continue
            if (pause := planned - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            group.create_task(one(request, planned))
    return timelines


def _not_sent(request: Request) -> Timeline:
    return Timeline(kind=request.kind, sent_at=time.perf_counter(), ended=0.0, error=NOT_SENT)
