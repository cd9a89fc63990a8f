"""The simulated pipeline: discrete events over replicas that share their time among the requests of their batch.

A replica is a processor-sharing server in virtual time: `progress` counts the units of work that each request of the
batch has had; a request's milestones (first tokens, first frames, end) stand at fixed progress and wait in a heap, so
that a change of the batch costs at most one new event, whatever its size, and none where it only makes the replica slower:
an event that comes too early is put off then. The entry binds a request to one replica of every
stage it needs before it starts, and queues it while one of them has no room, as the runtime does.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from benchmarks.autoscale_sim.entities import Counters, Outcome, Replica, Request
from benchmarks.autoscale_sim.stack import CODE2WAV, FRAME_SECONDS, STAGES, TALKER, THINKER, Stack

GROUPS = 4  # deliveries that are looked at between the first chunk and the end of an answer
COLD_RANGE = (60.0, 420.0)
EPSILON = 1e-9


class Simulation:
    def __init__(
        self,
        stack: Stack,
        requests: Sequence[Request],
        replicas: Sequence[int],
        *,
        devices: int,
        seed: int,
        cold: Callable[[int, random.Random], float] | None = None,
    ) -> None:
        self.stack, self.requests, self.devices = stack, requests, devices
        self.now = 0.0
        self.random = random.Random(seed)
        self._cold = cold or self._cold_start
        # (when, order, what to do, with whom, number)
        self._events: list[tuple[float, int, Callable[[Any, int], None], Any, int]] = []
        self._reached = (self._thought, self._talked, self._decoded)
        self._order = 0
        self.pools: tuple[list[Replica], list[Replica], list[Replica]] = ([], [], [])
        self.counters = (Counters(), Counters(), Counters())
        self.targets = list(replicas)
        self.waiting: tuple[deque[Request], deque[Request]] = (deque(), deque())  # text only, with audio
        self.outcomes: list[Outcome] = []
        self.ttfps: list[float] = []  # since the last window
        self.rtfs: list[float] = []
        self.dry: list[float] = []
        self.device_seconds = 0.0
        self.scale_events = 0
        self.max_waiting = 0
        self.slow = [1.0, 1.0, 1.0]
        self._servers = stack.servers
        self.on_end: Callable[[Request], None] | None = None
        for stage, count in enumerate(replicas):
            for _ in range(count):
                self.pools[stage].append(Replica(stage, 0.0, 0.0))
        self._billed_at = 0.0

    # --- time

    def at(self, when: float, handle: Callable[[Any, int], None], what: object, number: int = 0) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, handle, what, number))

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.at(when, lambda made, _: made(), call)

    def run(self, until: float) -> None:
        """Arrivals come from `requests`, ascending; everything that is open at `until` stays open."""
        events, arrivals = self._events, iter(self.requests)
        request = next(arrivals, None)
        next_arrival = math.inf if request is None else request.arrived
        while True:
            if events and events[0][0] <= next_arrival:
                when, _, handle, what, number = heappop(events)
                if when > until:
                    break
                self.now = when
                handle(what, number)
            elif request is not None and next_arrival <= until:
                self.now = next_arrival
                self.submit(request)
                request = next(arrivals, None)
                next_arrival = math.inf if request is None else request.arrived
            else:
                break
        self.now = until
        self.bill()

    # --- replicas

    def scale(self, stage: int, target: int) -> None:
        """As a Deployment does it: not-ready replicas leave first, then the least loaded; bound requests finish."""
        target = max(0, target)
        if target == self.targets[stage]:
            return
        self.bill()
        self.targets[stage] = target
        self.scale_events += 1
        pool = self.pools[stage]
        alive = [r for r in pool if not r.draining]
        if target < len(alive):
            alive.sort(key=lambda r: (r.ready_at <= self.now, r.held))
            for replica in alive[: len(alive) - target]:
                replica.draining = True
                if replica.held == 0:
                    pool.remove(replica)
        self._fill()

    def _fill(self) -> None:
        """Create what is missing while the nodes have room; the rest stays pending."""
        for stage, target in enumerate(self.targets):
            pool = self.pools[stage]
            missing = target - sum(not r.draining for r in pool)
            for _ in range(max(0, missing)):
                if self.used() + self.stack.servers[stage].devices > self.devices:
                    break
                self.bill()
                delay = self._cold(stage, self.random)
                replica = Replica(stage, self.now, self.now + delay)
                pool.append(replica)
                self.at(replica.ready_at, self._ready, replica)

    def _ready(self, replica: Replica, _: int) -> None:
        if replica in self.pools[replica.stage]:
            self.counters[replica.stage].cold.append(replica.ready_at - replica.born)
            replica.touched = self.now
            self._admit_waiting()

    def _cold_start(self, stage: int, numbers: random.Random) -> float:
        median = self.stack.servers[stage].cold_seconds
        return min(COLD_RANGE[1], max(COLD_RANGE[0], median * numbers.lognormvariate(0.0, 0.25)))

    def used(self) -> int:
        return sum(len(pool) * self.stack.servers[stage].devices for stage, pool in enumerate(self.pools))

    def bill(self) -> None:
        """Accelerators are paid from creation to the end of the drain."""
        self.device_seconds += self.used() * (self.now - self._billed_at)
        self._billed_at = self.now

    def ready(self, stage: int) -> list[Replica]:
        return [r for r in self.pools[stage] if r.ready_at <= self.now and not r.draining]

    def _wake(self, replica: Replica, _: int) -> None:
        if self.now != replica.wake:
            return  # an earlier event has taken its place
        replica.wake = math.inf
        if replica.due <= self.now:
            self._advance(replica)
            work, up_to, reached = replica.work, replica.progress + EPSILON, self._reached[replica.stage]
            while work and work[0][0] <= up_to:
                _, _, request, number = heappop(work)
                reached(replica, request, number)
            self._schedule(replica)
        elif replica.work:
            replica.wake = replica.due
            self.at(replica.due, self._wake, replica)

    def _advance(self, replica: Replica) -> None:
        if replica.active:
            replica.progress += (self.now - replica.touched) / replica.step
        replica.touched = self.now

    def _schedule(self, replica: Replica) -> None:
        """After every change of the batch: how fast it is now, and when it next has something to tell."""
        server = self._servers[replica.stage]
        replica.step = (server.base + server.slope * replica.active) * self.slow[replica.stage]
        if not replica.work:
            replica.due = math.inf
            return
        ahead = replica.work[0][0] - replica.progress
        replica.due = due = self.now + ahead * replica.step if ahead > 0.0 else self.now
        if due < replica.wake:
            replica.wake = due
            self._order += 1
            heappush(self._events, (due, self._order, self._wake, replica, 0))

    def slow_down(self, stage: int, factor: float) -> None:
        for replica in self.pools[stage]:
            self._advance(replica)
        self.slow[stage] = factor
        for replica in self.pools[stage]:
            self._schedule(replica)

    def _add(self, replica: Replica, request: Request, milestones: Sequence[tuple[float, int]]) -> None:
        """milestones: (units of work from now, number); the last one leaves the batch."""
        self._advance(replica)
        for units, number in milestones:
            self._order += 1
            heappush(replica.work, (replica.progress + units, self._order, request, number))
        replica.active += 1
        self._schedule(replica)

    # --- the entry

    def submit(self, request: Request) -> None:
        for stage in range(3 if request.audio else 1):
            self.counters[stage].arrivals += 1
        queue = self.waiting[request.audio]
        if queue or not self._bind(request):
            queue.append(request)
            self.max_waiting = max(self.max_waiting, len(self.waiting[0]) + len(self.waiting[1]))

    def _bind(self, request: Request) -> bool:
        chosen: list[Replica] = []
        for stage in range(3 if request.audio else 1):
            slots = self.stack.servers[stage].slots
            best, fewest = None, slots
            for replica in self.pools[stage]:
                if replica.held < fewest and not replica.draining and replica.ready_at <= self.now:
                    best, fewest = replica, replica.held
            if best is None:
                return False
            chosen.append(best)
        request.bound = self.now
        for stage, replica in enumerate(chosen):
            request.replicas[stage] = replica
            replica.held += 1
            self.counters[stage].hold(self.now, 1)
        request.started[THINKER] = self.now
        thinker = chosen[THINKER]
        thinker.lane.append(request)
        if len(thinker.lane) == 1:
            self._prefill(thinker)
        return True

    def _admit_waiting(self) -> None:
        for queue in self.waiting:
            while queue and self._bind(queue[0]):
                queue.popleft()

    def _release(self, request: Request, stage: int, busy: float, work: float) -> None:
        replica = request.replicas[stage]
        assert replica is not None
        counters = self.counters[stage]
        counters.hold(self.now, -1)
        counters.completions += 1
        counters.busy += busy
        counters.work += work
        replica.held -= 1
        if replica.draining:
            if replica.held == 0:
                self.bill()
                self.pools[stage].remove(replica)
                self._fill()
        elif self.waiting[0] or self.waiting[1]:
            self._admit_waiting()

    # --- the stages

    def _prefill(self, replica: Replica) -> None:
        """One prompt after the other; each step also carries the requests that decode."""
        stack, request = self.stack, replica.lane[0]
        request.prefill = self.now
        seconds = stack.prefill_seconds + stack.prefill_token_seconds * request.prompt
        seconds += stack.prefill_batch_seconds * replica.active
        self.at(self.now + seconds * self.slow[THINKER], self._prefilled, replica)

    def _prefilled(self, replica: Replica, _: int) -> None:
        request = replica.lane.popleft()
        first = min(self.stack.first_tokens, request.tokens)
        end = max(request.tokens, self.stack.first_tokens)
        self._add(replica, request, ((first, 0), (end + EPSILON, 1)) if request.audio else ((end, 1),))
        if replica.lane:
            self._prefill(replica)

    def _thought(self, replica: Replica, request: Request, number: int) -> None:
        if number == 0:
            self.at(self.now + self.stack.transfer_seconds, self._start_talking, request)
            return
        replica.active -= 1
        request.thinker_done = self.now
        self._release(request, THINKER, self.now - request.started[THINKER], request.tokens)
        if request.tail_held:
            # The talker had run out of text: the last chunk's frames were still to be made.
            request.tail_held = False
            talker = request.replicas[TALKER]
            assert talker is not None
            self._add(talker, request, ((min(self.stack.chunk_frames, request.frames), GROUPS),))

    def _start_talking(self, request: Request, _: int) -> None:
        replica = request.replicas[TALKER]
        assert replica is not None
        stack = self.stack
        request.started[TALKER] = self.now
        prefill = stack.talker_prefill_seconds / stack.servers[TALKER].base
        first = min(stack.initial_frames, request.frames)
        milestones = [(prefill + first, 0)]
        left = request.frames - first
        if left > 0:
            groups = min(GROUPS, -(-left // stack.chunk_frames))
            milestones += [(prefill + first + left * (g + 1) / groups, 1) for g in range(groups)]
        request.deadlines = [round(units - prefill) for units, _ in reversed(milestones)]
        units, _ = milestones[-1]
        milestones[-1] = (units, GROUPS)
        self._add(replica, request, milestones)

    def _talked(self, replica: Replica, request: Request, number: int) -> None:
        if number == GROUPS:
            replica.active -= 1
            if request.thinker_done < 0:
                request.tail_held = True
                self._advance(replica)
                return
            request.talker_done = self.now
            self._release(request, TALKER, self.now - request.started[TALKER], request.frames)
        self.at(self.now + self.stack.transfer_seconds, self._decode, request, request.deadlines.pop())

    def _decode(self, request: Request, frames: int) -> None:
        """A job of code2wav: the chunks up to frame number `frames`."""
        replica = request.replicas[CODE2WAV]
        assert replica is not None
        if request.started[CODE2WAV] < 0:
            request.started[CODE2WAV] = self.now
        request.held_at -= self.now  # computing seconds: ends minus starts
        chunks = max(1.0, (frames - request.sent) / self.stack.chunk_frames)
        request.sent = frames
        self._add(replica, request, ((chunks, frames),))

    def _decoded(self, replica: Replica, request: Request, frames: int) -> None:
        replica.active -= 1
        request.held_at += self.now
        if request.first < 0:
            self._first_packet(request)
        else:
            # The last chunk of this delivery must be there when the player has played all before it.
            due = request.first + (frames - self.stack.chunk_frames) * FRAME_SECONDS + request.dry
            request.dry += max(0.0, self.now - due)
        if frames >= request.frames:
            self._release(request, CODE2WAV, request.held_at, max(1.0, request.frames / self.stack.chunk_frames))
            rtf = (self.now - request.arrived) / (request.frames * FRAME_SECONDS)
            self.rtfs.append(rtf)
            self.dry.append(request.dry)
            self.outcomes.append(Outcome(request.arrived, request.first - request.arrived, rtf, request.dry))
            if self.on_end is not None:
                self.on_end(request)

    def _first_packet(self, request: Request) -> None:
        request.first = self.now
        self.ttfps.append(self.now - request.arrived)
        talking, decoding = request.started[TALKER], request.started[CODE2WAV]
        for stage, (start, end) in enumerate(((request.prefill, talking), (talking, decoding), (decoding, self.now))):
            self.counters[stage].compute.append(end - start)
        self.counters[THINKER].queue.append(request.prefill - request.bound)


def stage_index(name: str) -> int:
    return STAGES.index(name)
