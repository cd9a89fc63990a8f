"""Recorded windows: one JSON line each, enough to run decide() again on any machine. I/O is a file and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from omni_operator.autoscale.decide import decide
from omni_operator.autoscale.memory import restored
from omni_operator.autoscale.types import Decision, Limits, Spec, StageFleet, Window
from omni_operator.autoscale.view import State
from omni_operator.observed import Key

MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Record:
    """What one call of decide() was given; its state follows from the records before."""

    spec: Spec
    window: Window
    fleet: tuple[StageFleet, ...]
    limits: Limits
    now: float
    # Of the first call of a process: what `status.learned` had, or nothing ({}); None: the state of the call before.
    start: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    record: Record
    decision: Decision


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(line: bytes) -> Record:
    """Raises msgspec.ValidationError, which names the field."""
    return msgspec.json.decode(line, type=Record)


def append(folder: Path, key: Key, record: Record) -> None:
    """To the file of the pipeline; one that has grown too large starts anew, so that a disk never fills."""
    file = folder / f"{key.namespace}.{key.name}.jsonl"
    if file.exists() and file.stat().st_size > MAX_FILE_BYTES:
        file.replace(file.with_suffix(".jsonl.old"))
    with file.open("ab") as out:
        out.write(encode(record) + b"\n")


def read(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield decode(line)


def replay(records: Iterable[Record], change: Mapping[str, float] | None = None) -> Iterator[Replayed]:
    """decide() again. change: fields of Tuning to set otherwise, for "what would have been"."""
    state = State()
    for record in records:
        spec = replace(record.spec, tuning=replace(record.spec.tuning, **(change or {})))
        if record.start is not None:
            before = restored(record.spec, record.start or None, record.now, datetime.fromtimestamp(record.now, UTC))
            state = before.state or State()
        decision, state = decide(
            spec, record.window, {f.name: f for f in record.fleet}, record.limits, state, record.now
        )
        yield Replayed(record, decision)
