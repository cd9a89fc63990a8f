"""Does the simulator reproduce the published rows? Closed loop: `c` clients, each sends its next request when one ends."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.autoscale_sim.engine import Simulation
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.stack import ASYNC_CHUNK, ASYNC_OUTPUT, DOCUMENTED, Stack

TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """A published row: mean TTFP and RTF at a concurrency. rounds: requests per client."""

    name: str
    stack: Stack
    concurrency: int
    prompt: int
    tokens: int
    frames: int
    rounds: int
    ttfp_ms: float
    rtf: float


# Documented rows: 100 tokens in, 100 out; 6.18 s at RTF 0.22 are 28 s of audio, so 350 frames. Blog rows: Seed-TTS
# sentences; 64 concurrent at 9.3 requests/s and RTF 0.63 are 10.9 s of audio, so 140 frames.
ROWS = (
    Row("documented, 1 at once", DOCUMENTED, 1, 100, 100, 350, 1, 523, 0.22),
    Row("documented, 4 at once", DOCUMENTED, 4, 100, 100, 350, 1, 786, 0.29),
    Row("documented, 10 at once", DOCUMENTED, 10, 100, 100, 350, 1, 1629, 0.41),
    Row("blog, async chunk, 64 at once", ASYNC_CHUNK, 64, 60, 40, 140, 8, 655, 0.63),
    Row("blog, async output, 64 at once", ASYNC_OUTPUT, 64, 60, 40, 140, 8, 631, 0.47),
)


@dataclass(frozen=True, slots=True)
class Reproduced:
    row: Row
    ttfp_ms: float
    rtf: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of TTFP and RTF."""
        return self.ttfp_ms / self.row.ttfp_ms - 1, self.rtf / self.row.rtf - 1


def reproduce(row: Row) -> Reproduced:
    """All clients start at once, as `vllm bench serve --max-concurrency` does; everything counts, the start as well."""

    def request(at: float) -> Request:
        return Request(at, row.prompt, row.tokens, row.frames)

    simulation = Simulation(row.stack, [request(0.0) for _ in range(row.concurrency)], (1, 1, 1), devices=8, seed=0)
    left = row.concurrency * (row.rounds - 1)

    def again(_: Request) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            simulation.submit(request(simulation.now))

    simulation.on_end = again
    simulation.run(10_000.0)
    outcomes = simulation.outcomes
    return Reproduced(
        row,
        1000 * sum(o.ttfp for o in outcomes) / len(outcomes),
        sum(o.rtf for o in outcomes) / len(outcomes),
    )


def calibration() -> tuple[Reproduced, ...]:
    return tuple(reproduce(row) for row in ROWS)
