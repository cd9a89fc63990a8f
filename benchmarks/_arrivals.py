"""When requests come: seconds after the start, ascending. Pure, but for reading a trace file.

A trace may also say how long prompts and answers were (tokens). Formats: Azure's LLM inference traces (CSV: TIMESTAMP,
ContextTokens, GeneratedTokens) and Mooncake's (JSON lines: timestamp in ms, input_length, output_length).
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    input_tokens: int | None = None
    output_tokens: int | None = None


class UnknownTrace(ValueError):
    """The file is no trace that is understood; says which line and what would be."""


def poisson(rate: float, seconds: float, numbers: random.Random) -> list[float]:
    """Independent users: exponential gaps with mean 1/rate."""
    return gamma(rate, seconds, 1.0, numbers)


def gamma(rate: float, seconds: float, burstiness: float, numbers: random.Random) -> list[float]:
    """Gaps from a Gamma distribution with mean 1/rate and shape `burstiness`, as `vllm bench serve` has it: 1 is
    Poisson, below 1 comes in bursts (coefficient of variation 1/sqrt(burstiness)), above 1 is more even."""
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate {rate} and burstiness {burstiness} must be above 0")
    moments: list[float] = []
    now = numbers.gammavariate(burstiness, 1 / (rate * burstiness))
    while now < seconds:
        moments.append(now)
        now += numbers.gammavariate(burstiness, 1 / (rate * burstiness))
    return moments


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float  # milliseconds
    input_length: int | None = None
    output_length: int | None = None


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """All arrivals of a file, the first at 0. Raises UnknownTrace, OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            arrivals = [_of_mooncake(path, n, line) for n, line in enumerate(file, start=1) if line.strip()]
        else:
            rows = csv.DictReader(file)
            if rows.fieldnames is None or "TIMESTAMP" not in rows.fieldnames:
                raise UnknownTrace(
                    f"{path}: columns {rows.fieldnames}: no TIMESTAMP; use an Azure CSV or a Mooncake .jsonl"
                )
            arrivals = [_of_azure(path, rows.line_num, row) for row in rows]
    if not arrivals:
        raise UnknownTrace(f"{path}: has no arrivals")
    arrivals.sort(key=lambda a: a.at_s)
    first = arrivals[0].at_s
    return tuple(replace(a, at_s=a.at_s - first) for a in arrivals)


def _of_mooncake(path: Path, number: int, line: str) -> Arrival:
    try:
        row = msgspec.json.decode(line, type=_MooncakeLine)
    except msgspec.DecodeError as error:
        raise UnknownTrace(f"{path}, line {number}: {error}; a line is {{timestamp (ms), input_length, ...}}") from None
    return Arrival(row.timestamp / 1000, row.input_length, row.output_length)


def _of_azure(path: Path, number: int, row: dict[str, str]) -> Arrival:
    try:
        # Seven digits of a second stand there; Python reads six.
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        at = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        return Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownTrace(
            f"{path}, line {number}: {error}; a row is TIMESTAMP,ContextTokens,GeneratedTokens"
        ) from None


def window(arrivals: Sequence[Arrival], start_s: float, seconds: float) -> tuple[Arrival, ...]:
    """The arrivals of [start_s, start_s + seconds), counted from start_s."""
    return tuple(replace(a, at_s=a.at_s - start_s) for a in arrivals if start_s <= a.at_s < start_s + seconds)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> tuple[Arrival, ...]:
    """The same pattern at another mean rate: gaps are stretched alike, bursts stay bursts."""
    if len(arrivals) < 2 or arrivals[-1].at_s <= arrivals[0].at_s:
        return tuple(arrivals)
    own = (len(arrivals) - 1) / (arrivals[-1].at_s - arrivals[0].at_s)
    return tuple(replace(a, at_s=a.at_s * own / rate) for a in arrivals)


def mean_rate(arrivals: Iterable[Arrival]) -> float:
    moments = [a.at_s for a in arrivals]
    return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 and moments[-1] > moments[0] else 0.0
