"""Arrivals of the traces, as requests of the simulator.

What the traces do not have is made up, and said here: which requests ask for audio (each with AUDIO_SHARE, drawn by
the seed), and how much audio an answer is (3.5 codec frames a token, as in the documented rows; at most a minute).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.autoscale_sim.entities import Request

TRACES = Path(__file__).parent / "traces"
AUDIO_SHARE = 0.6
FRAMES_PER_TOKEN = 3.5
MIN_FRAMES, MAX_FRAMES = 25, 750

CODE_COPIES, CODE_JITTER_SECONDS = 3, 3.0
DAY_SECONDS = 86_400.0
PRESSED_SECONDS = 10_800.0
EVERYBODY_RATE = 3.5
NIGHT, DAYTIME = (0, 6), (9, 18)  # hours


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """ttfp_seconds: the objective, 95 of 100."""

    name: str
    what: str
    ttfp_seconds: float
    arrivals: Callable[[random.Random], list[Arrival]]


@cache
def _rows(path: str) -> tuple[Arrival, ...]:
    with gzip.open(TRACES / path, "rt", encoding="utf-8") as file:
        return tuple(
            Arrival(int(r["at_ms"]) / 1000, int(r["prompt"]), max(1, int(r["output"]))) for r in csv.DictReader(file)
        )


def _as_recorded(path: str) -> Callable[[random.Random], list[Arrival]]:
    return lambda numbers: list(_rows(path))


def _copies(numbers: random.Random) -> list[Arrival]:
    """Several users of one shape: each request comes three times within seconds, so that bursts stay bursts."""
    return [
        Arrival(max(0.0, a.at + numbers.gauss(0.0, CODE_JITTER_SECONDS)), a.prompt, a.tokens)
        for a in _rows("azure2023/code.csv.gz")
        for _ in range(CODE_COPIES)
    ]


@cache
def _clients() -> tuple[Mapping[str, Any], ...]:
    with gzip.open(TRACES / "servegen/mm_image.json.gz", "rt", encoding="utf-8") as file:
        clients = json.load(file)["clients"]
    return tuple(clients.values() if isinstance(clients, dict) else clients)


def _asleep_at_night(client: Mapping[str, Any]) -> bool:
    """Half as many requests an hour by night as by day, or fewer: people, and no batch jobs."""

    def hourly(hours: tuple[int, int]) -> float:
        first, last = hours
        return float(sum(w[1] for w in client["trace"] if first * 3600 <= w[0] < last * 3600)) / (last - first)

    return hourly(NIGHT) < 0.5 * hourly(DAYTIME)


def _daily(seconds: float) -> Callable[[random.Random], list[Arrival]]:
    """Those that have a day and a night, at their own rate of 4.4 requests a second, 0.1 to 2.1 times that by the hour."""
    return lambda numbers: _day(numbers, tuple(c for c in _clients() if _asleep_at_night(c)), None, seconds)


def _everybody(numbers: random.Random) -> list[Arrival]:
    """All clients, thinned. Batch jobs fill the night: 0.6 to 1.35 times the mean by the hour."""
    return _day(numbers, _clients(), EVERYBODY_RATE, PRESSED_SECONDS)


def _day(
    numbers: random.Random, clients: Sequence[Mapping[str, Any]], rate: float | None, seconds: float
) -> list[Arrival]:
    """ServeGen's rule: per client and window, n = ceil(rate * length) gaps from its distribution, stretched to fill it.

    The day is pressed into `seconds`: in three hours its ramps are eight times as steep. rate: mean requests per
    second; None: as the trace has it.
    """
    mean = sum(w[1] * 600.0 for c in clients for w in c["trace"]) / DAY_SECONDS
    thin, squeeze = (rate or mean) / mean, seconds / DAY_SECONDS
    arrivals: list[Arrival] = []
    for client in clients:
        draws = _draws(client["dataset"])
        for start, per_second, _, kind, shape, scale in client["trace"]:
            expected = per_second * 600.0 * thin * squeeze
            count = int(expected) + (numbers.random() < expected % 1)
            if count == 0 or shape is None:
                continue
            gaps = [
                numbers.gammavariate(shape, scale) if kind == "Gamma" else numbers.weibullvariate(scale, shape)
                for _ in range(count + 1)
            ]
            stretch, at = 600.0 / max(sum(gaps), 1e-9), float(start)
            draw = draws[max(k for k in draws if k <= start) if any(k <= start for k in draws) else min(draws)]
            for gap in gaps[:-1]:
                at += gap * stretch
                text, images, image, output = (d(numbers) for d in draw)
                arrivals.append(Arrival(at * squeeze, text + images * image, max(1, output)))
    return arrivals


def _draws(dataset: Mapping[str, Any]) -> dict[float, list[Callable[[random.Random], int]]]:
    return {
        float(start): [
            _sampler(pmfs.get(name) or {"0": 1.0})
            for name in ("text_tokens", "image_count", "image_tokens", "output_tokens")
        ]
        for start, pmfs in dataset.items()
    }


def _sampler(pmf: Mapping[str, float]) -> Callable[[random.Random], int]:
    values, up_to = [int(float(v)) for v in pmf], list(accumulate(pmf.values()))
    return lambda numbers: numbers.choices(values, cum_weights=up_to)[0]


TRACES_BY_NAME = {
    t.name: t
    for t in (
        Trace("azure_conv", "smooth: 5.5 requests/s for 58 minutes", 1.5, _as_recorded("azure2023/conv.csv.gz")),
        Trace("azure_code", "bursts: 7.7 requests/s in bursts of minutes, gaps between them", 1.5, _copies),
        Trace("servegen", "people's day with images in three hours, 4.4 requests/s", 1.5, _daily(PRESSED_SECONDS)),
        Trace("servegen_all", "the same day with the batch jobs of the night, 3.5 requests/s", 1.5, _everybody),
        Trace(
            "mooncake", "long prompts: 3.4 requests/s for 59 minutes", 3.0, _as_recorded("mooncake/conversation.csv.gz")
        ),
    )
}
MAIN = tuple(TRACES_BY_NAME)  # what --all runs; more of the same day takes as much longer as it has more hours
TRACES_BY_NAME |= {
    f"servegen_{hours}h": Trace(f"servegen_{hours}h", f"the same in {hours} hours", 1.5, _daily(3600.0 * hours))
    for hours in (6, 12, 24)
}


@lru_cache(maxsize=2)
def _drawn(name: str, seed: int, audio_share: float) -> tuple[tuple[float, int, int, int], ...]:
    """(arrival, prompt, tokens, frames; 0: text only), ascending."""
    numbers = random.Random(f"{name}/{seed}")
    found = []
    for arrival in sorted(TRACES_BY_NAME[name].arrivals(numbers), key=lambda a: a.at):
        frames = min(MAX_FRAMES, max(MIN_FRAMES, round(FRAMES_PER_TOKEN * arrival.tokens)))
        audio = numbers.random() < audio_share
        found.append((arrival.at, arrival.prompt, arrival.tokens, frames if audio else 0))
    return tuple(found)


def requests_of(
    trace: Trace, seed: int, *, audio_share: float = AUDIO_SHARE, seconds: float = math.inf
) -> list[Request]:
    """Ascending; the same seed the same requests for every policy."""
    return [Request(*drawn) for drawn in _drawn(trace.name, seed, audio_share) if drawn[0] < seconds]
