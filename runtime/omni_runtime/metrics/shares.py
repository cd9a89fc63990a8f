"""Where the time to the first audio packet went: queue, compute and transfer of each stage. Pure.

The stages on the way to the audio start one after the other. Between the start of one and the start of the next lie the
compute of the first, the transfer of its first rows, and the queue of the second; the second told the last two as
durations of its own clock. What they leave of the interval, on the entry's clock, is compute. So the shares of one
request add up to its TTFP exactly, and clocks that differ between machines do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from omni_runtime.orchestrator.state import RequestState
from omni_runtime.orchestrator.values import Instant, StageName

ENTRY = "entry"


class Component(StrEnum):
    QUEUE = "queue"
    COMPUTE = "compute"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Share:
    component: Component
    stage: StageName
    seconds: float


def ttfp_shares(state: RequestState, path: Iterable[StageName], now: Instant) -> tuple[Share, ...]:
    """Shares of `now - state.queued_at`; none is negative.

    path: the stages that lead to the audio, in topological order. A stage whose start is not known yet is part of the
    compute of the one before. What precedes the binding (the entry's queue, an attempt that was lost) is queue.
    """
    bound = _between(state.queued_at, state.bound_at if state.bound_at is not None else now, now)
    shares: list[Share] = []
    before, at = None, bound  # the stage that computes, and since when
    for name in path:
        record = state.stages.get(name)
        if record is None or record.started_at is None:
            continue
        started = _between(at, record.started_at, now)
        interval = started - at
        if before is None:
            shares.append(Share(Component.QUEUE, name, interval))
        else:
            queue = _between(0.0, record.queue_seconds, interval)
            transfer = _between(0.0, record.transfer_seconds, interval - queue)
            shares.append(Share(Component.COMPUTE, before, interval - queue - transfer))
            shares.append(Share(Component.TRANSFER, name, transfer))
            shares.append(Share(Component.QUEUE, name, queue))
        before, at = name, started
    if before is None:
        return (Share(Component.QUEUE, ENTRY, now - state.queued_at),)
    return (
        Share(Component.QUEUE, ENTRY, bound - state.queued_at),
        *shares,
        Share(Component.COMPUTE, before, now - at),
    )


def _between(low: float, value: float, high: float) -> float:
    return min(max(low, value), max(low, high))
