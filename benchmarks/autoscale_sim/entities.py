"""What a simulation is about: requests on their way, replicas with their batch, counters as a process has them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

AUDIBLE_SECONDS = 0.1


class Request:
    """One request on its way; times are absolute, -1: not yet."""

    __slots__ = (
        "arrived",
        "audio",
        "bound",
        "deadlines",
        "dry",
        "first",
        "frames",
        "held_at",
        "prefill",
        "prompt",
        "replicas",
        "sent",
        "started",
        "tail_held",
        "talker_done",
        "thinker_done",
        "tokens",
    )

    def __init__(self, arrived: float, prompt: int, tokens: int, frames: int) -> None:
        self.arrived, self.prompt, self.tokens, self.frames = arrived, prompt, tokens, frames
        self.audio = frames > 0
        self.replicas: list[Replica | None] = [None, None, None]
        self.bound = self.prefill = self.first = self.thinker_done = self.talker_done = -1.0
        self.started = [-1.0, -1.0, -1.0]
        self.held_at = 0.0
        self.sent = 0  # frames that were handed to code2wav
        self.dry = 0.0
        self.tail_held = False
        self.deadlines: list[int] = []  # frames of the deliveries that are left, the next one last


class Replica:
    __slots__ = (
        "active",
        "born",
        "draining",
        "due",
        "held",
        "lane",
        "progress",
        "ready_at",
        "stage",
        "step",
        "touched",
        "wake",
        "work",
    )

    def __init__(self, stage: int, born: float, ready_at: float) -> None:
        self.stage, self.born, self.ready_at = stage, born, ready_at
        self.progress, self.touched, self.step = 0.0, ready_at, 1.0  # step: seconds per unit of work now
        self.due = self.wake = math.inf  # when its next milestone is due, and its earliest event in the heap
        self.work: list[
            tuple[float, int, Request, int]
        ] = []  # (progress at which it is due, order, request, milestone)
        self.active = 0  # requests in the batch now
        self.held = 0  # requests bound to it
        self.draining = False
        self.lane: deque[Request] = deque()  # prompts that wait for the prefill, the one that is worked on included


@dataclass(slots=True)
class Counters:
    """Cumulative, like the metrics of a process; one per stage."""

    arrivals: int = 0
    completions: int = 0
    busy: float = 0.0
    work: float = 0.0
    held: int = 0
    held_seconds: float = 0.0
    held_since: float = 0.0
    queue: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)

    def hold(self, now: float, change: int) -> None:
        self.held_seconds += self.held * (now - self.held_since)
        self.held_since = now
        self.held += change


@dataclass(slots=True)
class Outcome:
    """What a listener had; one per audio request that ended or never started."""

    arrived: float
    ttfp: float
    rtf: float
    dry: float
