"""How long a process may sleep at one of vLLM's message queues.

vLLM's wake-up is a datagram that may be dropped: a ZeroMQ publisher with room for one message drops a second one that
comes within about a millisecond, and a step gives two answers. vLLM looks again after five seconds; nobody notices
while it spins, but whoever sleeps at once loses those five seconds in the middle of an answer.
"""

from __future__ import annotations

from typing import Any

LOOK_AGAIN_MS = 2  # a fraction of a step on CPUs, and rare enough to cost no measurable part of a core


class ImpatientPoller:
    """A zmq.Poller whose `poll` returns after LOOK_AGAIN_MS at the latest; the queue looks at its memory then."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller

    def poll(self, timeout: int | None = None) -> Any:
        return self._poller.poll(LOOK_AGAIN_MS if timeout is None else min(timeout, LOOK_AGAIN_MS))


def sleep_at_once(condition: Any) -> None:
    """`condition`: vLLM's SpinCondition of a reader. It no longer spins, and no lost wake-up keeps it asleep."""
    condition.busy_loop_s = 0.0
    condition.poller = ImpatientPoller(condition.poller)
