"""Clients that do everything to a running pipeline at once, and the books that they keep of it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from omni_runtime.errors import DeadlineExceeded, InputLost, ReplicaLost, StageUnavailable, UpstreamLost

#: What a client may be told while replicas are killed. Anything else is a fault.
TOLD = frozenset(e.code for e in (DeadlineExceeded, InputLost, ReplicaLost, StageUnavailable, UpstreamLost))
SILENCE_SECONDS = 60.0  # without a byte: it hangs
DEADLINE_SECONDS = 45.0  # of a request that is not in a hurry; the server has to end it before its client gives up

QUESTIONS = ("Name one colour.", "Why is the sky blue?", "Tell me about the sea.", "What is bread made of?")

Check = Callable[[dict[str, Any]], str]  # an answer in one piece -> what is wrong with it, "" if nothing


@dataclass(slots=True)
class Books:
    """Every request is in exactly one of them. strange: what must not happen."""

    sent: int = 0
    complete: int = 0
    left: int = 0
    told: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def ended(self) -> int:
        return self.complete + self.left + self.told.total() + len(self.strange)


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. leave_after: events that the client takes before it goes; None: it stays."""

    path: str
    body: dict[str, Any]
    leave_after: int | None = None
    check: Check | None = None


def random_plan(rng: random.Random, *, speaks_text: bool, exact: Sequence[Plan]) -> Plan:
    if exact and rng.random() < 0.3:
        return rng.choice(exact)
    hurry = rng.random() < 0.1
    timeout = rng.uniform(0.05, 1.0) if hurry else DEADLINE_SECONDS
    leave = rng.randint(0, 12) if rng.random() < 0.35 else None
    if speaks_text and rng.random() < 0.25:
        text = " ".join(rng.choice(QUESTIONS) for _ in range(rng.randint(1, 3)))
        return Plan("/v1/audio/speech", {"input": text, "stream": True, "timeout_seconds": timeout}, leave)
    body = {
        "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}],
        "modalities": rng.choice((["text"], ["text", "audio"], ["text", "audio"], ["audio"])),
        "max_tokens": rng.randint(1, 24),
        "stream": leave is not None or rng.random() < 0.7,
        "timeout_seconds": timeout,
    }
    return Plan("/v1/chat/completions", body, leave)


class Client:
    """One thread: request after request until `stop`. Books are shared, under `lock`."""

    def __init__(self, url: str, books: Books, lock: threading.Lock, stop: threading.Event) -> None:
        self._url, self._books, self._lock, self._stop = url, books, lock, stop

    def run(self, plans: Callable[[], Plan]) -> None:
        with httpx.Client(base_url=self._url, timeout=SILENCE_SECONDS) as http:
            while not self._stop.is_set():
                plan = plans()
                with self._lock:
                    self._books.sent += 1
                started = time.monotonic()
                try:
                    outcome = _streamed(http, plan) if plan.body.get("stream") else _whole(http, plan)
                except Exception as error:
                    outcome = f"{type(error).__name__}: {error}"
                with self._lock:
                    self._note(plan, outcome, time.monotonic() - started)

    def _note(self, plan: Plan, outcome: str, seconds: float) -> None:
        books = self._books
        books.slowest = max(books.slowest, seconds)
        if outcome == "complete":
            books.complete += 1
        elif outcome == "left":
            books.left += 1
        elif outcome in TOLD:
            books.told[outcome] += 1
        else:
            books.strange.append(f"{plan.path} {plan.body.get('modalities', '')}: {outcome}")


def _whole(http: httpx.Client, plan: Plan) -> str:
    response = http.post(plan.path, json=plan.body)
    if response.status_code != 200:
        return str(response.json()["error"]["code"])
    if plan.check is not None and (problem := plan.check(response.json())):
        return problem
    return "complete"


def _streamed(http: httpx.Client, plan: Plan) -> str:
    seen, ended = 0, False
    with http.stream("POST", plan.path, json=plan.body) as response:
        if response.status_code != 200:
            response.read()
            return str(response.json()["error"]["code"])
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            if plan.leave_after is not None and seen >= plan.leave_after:
                return "left"
            seen += 1
            event = {} if "[DONE]" in line else json.loads(line[5:])
            if "error" in event:
                return str(event["error"]["code"])
            ended = ended or _ends(event)
    return "complete" if ended else "the stream ended without an end"


def _ends(event: dict[str, Any]) -> bool:
    return event.get("type") == "speech.audio.done" or any(c.get("finish_reason") for c in event.get("choices", ()))
