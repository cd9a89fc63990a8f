"""Which replica of a stage gets a request. Pure: every policy answers from what it is given.

A policy gets one candidate at least, and all of them have a free place. The names are those of `spec.entry.routing`.
"""

from __future__ import annotations

from hashlib import blake2b

from omni_runtime.orchestrator.pool import Ask, Policy, Replica


def least_queue(candidates: tuple[Replica, ...], ask: Ask) -> Replica:
    """The replica with the most room relative to its size; ties go round."""
    start = ask.turn % len(candidates)
    rotated = candidates[start:] + candidates[:start]
    return min(rotated, key=_fill)


def round_robin(candidates: tuple[Replica, ...], ask: Ask) -> Replica:
    return candidates[ask.turn % len(candidates)]


def power_of_two(candidates: tuple[Replica, ...], ask: Ask) -> Replica:
    """The better of two that the request's id draws: many entries with old news do not all run to the same replica."""
    if len(candidates) == 1:
        return candidates[0]
    draw = _hash(ask.request)
    first = draw % len(candidates)
    second = (first + 1 + (draw >> 32) % (len(candidates) - 1)) % len(candidates)
    return min(candidates[first], candidates[second], key=_fill)


def session_affine(candidates: tuple[Replica, ...], ask: Ask) -> Replica:
    """The session's own replica; if that is full or gone, the session's second one, and so on.

    Rendezvous hashing: a replica that joins or leaves moves only the sessions that are or were its own.
    """
    if not ask.session:
        return least_queue(candidates, ask)
    return max(candidates, key=lambda r: _hash(f"{ask.session}\0{r.id}"))


POLICIES: dict[str, Policy] = {
    "LeastQueue": least_queue,
    "RoundRobin": round_robin,
    "PowerOfTwo": power_of_two,
    "SessionAffine": session_affine,
}


def _fill(replica: Replica) -> tuple[float, int]:
    return len(replica.bound) / replica.hello.capacity, replica.load.waiting


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
