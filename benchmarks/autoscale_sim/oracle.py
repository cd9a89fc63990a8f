"""What a forecast without error would do: from the trace itself, the replicas that each moment needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.autoscale_sim.baselines import CAPACITY, MIN
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.stack import CODE2WAV, STAGES, TALKER, THINKER, Stack

BIN_SECONDS = 5.0


def needed(stack: Stack, requests: Sequence[Request], until: float) -> list[list[int]]:
    """Per stage and bin: replicas such that no more than CAPACITY requests share one."""
    bins = int(until / BIN_SECONDS) + 1
    counts = []
    for stage in range(len(STAGES)):
        edges = [0] * (bins + 2)
        for request in requests:
            span = _span(stack, request, stage)
            if span is None:
                continue
            first = min(bins, int(span[0] / BIN_SECONDS))
            last = min(bins, int(span[1] / BIN_SECONDS))
            edges[first] += 1
            edges[last + 1] -= 1
        found, open_now = [], 0
        for change in edges[:bins]:
            open_now += change
            found.append(max(MIN, math.ceil(open_now / CAPACITY[stage])))
        counts.append(found)
    return counts


def _span(stack: Stack, request: Request, stage: int) -> tuple[float, float] | None:
    """When the request holds its place, at CAPACITY."""
    steps = [s.base + s.slope * c for s, c in zip(stack.servers, CAPACITY, strict=True)]
    prefill = stack.prefill_seconds + stack.prefill_token_seconds * request.prompt
    prefill += stack.prefill_batch_seconds * CAPACITY[THINKER] / 2
    if stage == THINKER:
        return request.arrived, request.arrived + prefill + request.tokens * steps[THINKER]
    if not request.audio:
        return None
    end = request.arrived + prefill + request.frames * steps[TALKER]
    return request.arrived, end + (steps[CODE2WAV] if stage == CODE2WAV else 0.0)


def schedule(stack: Stack, requests: Sequence[Request], until: float) -> list[tuple[float, tuple[int, ...]]]:
    """(from when, replicas): each replica is asked for one median cold start before it is needed, and is let go where
    the gap until it is needed again is longer than that."""
    levels = []
    for stage, counts in enumerate(needed(stack, requests, until)):
        cold = math.ceil(stack.servers[stage].cold_seconds / BIN_SECONDS) + 1
        levels.append(_ahead(counts, cold))
    changes: list[tuple[float, tuple[int, ...]]] = []
    for index in range(len(levels[0])):
        now = tuple(level[index] for level in levels)
        if not changes or changes[-1][1] != now:
            changes.append((index * BIN_SECONDS, now))
    return changes


def _ahead(counts: Sequence[int], cold: int) -> list[int]:
    ahead = [0] * len(counts)
    for level in range(1, max(counts) + 1):
        busy = [i for i, n in enumerate(counts) if n >= level]
        spans: list[list[int]] = []
        for i in busy:
            if spans and i - spans[-1][1] <= 2 * cold:
                spans[-1][1] = i
            else:
                spans.append([i, i])
        for start, end in spans:
            for i in range(max(0, start - cold), end + 1):
                ahead[i] += 1
    return ahead
