"""What keeps counts from following noise, as a list of reasons not to shrink now. Pure.

Growing is never delayed: a listener waits. Shrinking waits until every wish of the last minutes was as small, and a
stage that has just turned round stays (T24).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omni_operator.autoscale.types import LOWER_BOUND, StageFleet, StageSpec, Tuning, Window

REGRET_SECONDS = 21_600.0  # of about the same load, a count that was too small is too small again
REGRET_SHARE = 0.9  # of the load at which a count was too small; below it, it is worth another try


@dataclass(frozen=True, slots=True)
class Wish:
    """What would have been enough at one moment, with margin, in the order of the spec."""

    at: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Regret:
    """A count that was shrunk to and taken back, and the load that it did not bear, in requests per second."""

    count: int
    load: float
    at: float


@dataclass(frozen=True, slots=True)
class Moves:
    """When a stage last changed. -inf: never."""

    at: float = float("-inf")
    direction: int = 0
    turned: float = float("-inf")  # when the direction last changed
    regret: Regret | None = None

    def after(self, now: float, direction: int, regret: Regret | None) -> Moves:
        turned = now if self.direction not in (0, direction) else self.turned
        return Moves(now, direction, turned, regret)


@dataclass(frozen=True, slots=True)
class Shrinking:
    """What a check sees."""

    spec: StageSpec
    fleet: StageFleet
    moves: Moves
    window: Window
    tuning: Tuning
    breach: str
    burst: bool
    now: float
    count: int  # that it would shrink to
    load: float  # requests per second that are planned for


Check = Callable[[Shrinking], str | None]


def not_on_partial_data(s: Shrinking) -> str | None:
    """A lower bound of the load proves no slack (T27)."""
    return f"data is {s.window.freshness.value.lower()}" if s.window.freshness in LOWER_BOUND else None


def not_in_a_breach(s: Shrinking) -> str | None:
    """What is too slow now is not made smaller, whatever the model says; one that is wrong shows itself here (T30)."""
    return f"objective {s.breach} is missed" if s.breach else None


def not_in_a_burst(s: Shrinking) -> str | None:
    return "burst" if s.burst else None


def not_while_coming(s: Shrinking) -> str | None:
    """Replicas that were asked for are on their way: their effect has not been seen yet (T23)."""
    return f"{s.fleet.pending} replicas are starting" if s.fleet.pending > 0 and s.fleet.ready > 0 else None


def not_while_draining(s: Shrinking) -> str | None:
    """One step at a time: what drains still carries streams, and its load comes to the others."""
    return f"{s.fleet.draining} replicas are draining" if s.fleet.draining > 0 else None


def not_after_turning(s: Shrinking) -> str | None:
    ago = s.now - s.moves.turned
    return f"turned {ago:.0f} s ago" if ago <= s.tuning.reversal_seconds else None


def not_so_soon(s: Shrinking) -> str | None:
    """A replica that came up is kept for one stabilisation window: it was paid for with a cold start."""
    wait = s.tuning.scale_down_seconds if s.moves.direction > 0 else s.tuning.min_write_seconds
    return "changed just now" if s.now - s.moves.at < wait else None


def not_what_was_regretted(s: Shrinking) -> str | None:
    """This count was too small for about as much load: to try it again would be two turns within minutes (T24)."""
    regret = s.moves.regret
    if regret is None or s.count > regret.count or s.now - regret.at >= REGRET_SECONDS:
        return None
    return (
        f"{regret.count} were too few at {regret.load:.2f} requests/s" if s.load > REGRET_SHARE * regret.load else None
    )


# In the order in which a person wants to hear them; the first that speaks is the reason.
CHECKS: tuple[Check, ...] = (
    not_on_partial_data,
    not_in_a_breach,
    not_in_a_burst,
    not_while_coming,
    not_while_draining,
    not_after_turning,
    not_so_soon,
    not_what_was_regretted,
)


def reason_to_keep(shrinking: Shrinking) -> str | None:
    return next((said for check in CHECKS if (said := check(shrinking)) is not None), None)


def settled(wishes: Sequence[Wish], stage: int, current: int, now: float, seconds: float) -> int:
    """The largest wish of the last `seconds`. A memory that does not reach so far back (a restart) wishes for `current`."""
    if not wishes or wishes[0].at > now - seconds:
        return current
    recent = [w.counts[stage] for w in wishes if w.at > now - seconds]
    return min(current, max(recent, default=current))


def remember(wishes: Sequence[Wish], wish: Wish, seconds: float) -> tuple[Wish, ...]:
    """With the new one; one older than the window is kept as the proof that the memory reaches back far enough."""
    kept = [*wishes, wish]
    while len(kept) > 1 and kept[1].at <= wish.at - seconds:
        kept.pop(0)
    return tuple(kept)


def moved(moves: Moves, current: int, target: int, now: float, load: float) -> Moves:
    """load: requests per second that are planned for."""
    if target == current:
        return moves
    taken_back = target > current and moves.direction < 0  # what grows twice in a row has not been tried smaller
    return moves.after(now, 1 if target > current else -1, Regret(current, load, now) if taken_back else moves.regret)
