"""How requests went lately: for Retry-After and for the status."""

from __future__ import annotations

from collections import deque

TTFP_WINDOW = 256
WEIGHT = 0.2  # of the newest request


class Recent:
    """seconds: a moving average of how long requests took."""

    def __init__(self) -> None:
        self.seconds = 1.0
        self._ttfp: deque[float] = deque(maxlen=TTFP_WINDOW)

    def took(self, seconds: float) -> None:
        self.seconds += WEIGHT * (seconds - self.seconds)

    def first_packet(self, seconds: float) -> None:
        self._ttfp.append(seconds)

    def ttfp_p95_ms(self) -> float | None:
        """None: no audio yet."""
        if not self._ttfp:
            return None
        ordered = sorted(self._ttfp)
        return round(1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1)
