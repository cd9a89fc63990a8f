"""Requests that wait for a place, and whose they are: bounds, order, fairness. No I/O, no clock.

Tenants share by requests in flight: the next place goes to the tenant that has the fewest, counting those of its own
that are further ahead in the queue. So a flood of one tenant delays the first request of another by no more than one
place, and a tenant alone has all of them. Within a tenant, and between equals, first come is first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from omni_runtime.orchestrator.admission import AdmissionRules, Overloaded
from omni_runtime.orchestrator.spec import RequestSpec
from omni_runtime.orchestrator.values import RequestId, StageName

T = TypeVar("T")


class RequestQueue:
    """What waits, in order of arrival, and how many requests of each tenant run."""

    def __init__(self, rules: AdmissionRules) -> None:
        self._rules = rules
        self._waiting: dict[RequestId, RequestSpec] = {}
        self._again: dict[RequestId, RequestSpec] = {}  # they waited once already
        self._running: dict[RequestId, str] = {}
        self._waits_of: Counter[str] = Counter()  # requests per tenant
        self._runs_of: Counter[str] = Counter()
        self._kinds: Counter[tuple[StageName, ...]] = Counter()  # what waits, by the stages that it needs

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """What waits."""
        return (*self._again, *self._waiting)

    def refusal(self, tenant: str, recent_seconds: float) -> Overloaded | None:
        """Why one more request of this tenant cannot wait; None: there is room, or room can be made.

        recent_seconds: how long requests took lately, a guess for Retry-After.
        """
        retry = max(1, min(60, round(recent_seconds)))
        held = self._waits_of[tenant] + self._runs_of[tenant]
        if self._rules.max_per_tenant is not None and held >= self._rules.max_per_tenant:
            whose = f"tenant {tenant!r} has" if tenant else "requests without a tenant:"
            return Overloaded(
                "tenant", f"{whose} {held} running or waiting (limit {self._rules.max_per_tenant})", retry
            )
        if len(self) >= self._rules.max_queue and self._greediest(tenant) is None:
            waiting = f"{len(self)} requests wait already (limit {self._rules.max_queue})"
            return Overloaded("queue", waiting, retry, "or add replicas to the stage with the longest queue")
        return None

    def to_displace(self, tenant: str, recent_seconds: float) -> tuple[RequestId, Overloaded] | None:
        """Who gives way to one more request of this tenant: the last of the tenant that fills the queue most."""
        greedy = self._greediest(tenant) if len(self) >= self._rules.max_queue else None
        if greedy is None:
            return None
        last = next(r for r in reversed(self._waiting) if self._waiting[r].tenant == greedy)
        whose = f"tenant {greedy!r}" if greedy else "requests without a tenant"
        retry = max(1, min(60, round(recent_seconds)))
        return last, Overloaded(
            "share",
            f"the queue is full (limit {self._rules.max_queue}) and {whose} had the most in it "
            f"({self._waits_of[greedy]}): the last of them gave way to another tenant",
            retry,
        )

    def _greediest(self, newcomer: str) -> str | None:
        """The tenant that waits with the most requests, if it would still have as many as the newcomer after giving one
        up. Only requests that wait for the first time can give way."""
        counts = Counter(spec.tenant for spec in self._waiting.values())
        if not counts:
            return None
        tenant, count = max(counts.items(), key=lambda item: item[1])
        return tenant if count > self._waits_of[newcomer] + 1 else None

    # --- life of a request

    def add(self, spec: RequestSpec, *, again: bool = False) -> None:
        """`again`: it ran, lost a replica, and goes before those that have not run yet."""
        (self._again if again else self._waiting)[spec.request] = spec
        self._waits_of[spec.tenant] += 1
        self._kinds[spec.stages] += 1

    def start(self, request: RequestId) -> None:
        """It is bound to its replicas."""
        spec = self._take(request)
        if spec is not None:
            self._running[request] = spec.tenant
            self._runs_of[spec.tenant] += 1

    def leave(self, request: RequestId) -> None:
        """It has ended, wherever it was."""
        if self._take(request) is None and request in self._running:
            _count_down(self._runs_of, self._running.pop(request))

    def _take(self, request: RequestId) -> RequestSpec | None:
        spec = self._again.pop(request, None) or self._waiting.pop(request, None)
        if spec is not None:
            _count_down(self._waits_of, spec.tenant)
            _count_down(self._kinds, spec.stages)
        return spec

    def stuck(self, free: Mapping[StageName, int]) -> dict[StageName, int] | None:
        """If nothing of what waits can start: how many wait per stage. Cheap, for a queue that is full all the time."""
        waiting: dict[StageName, int] = {}
        for stages, count in self._kinds.items():
            full = [s for s in stages if free.get(s, 0) <= 0]
            if not full:
                return None
            for stage in full:
                waiting[stage] = waiting.get(stage, 0) + count
        return waiting

    def in_order(self) -> list[RequestSpec]:
        """Who comes next, first to last."""
        first, then = list(self._again.values()), list(self._waiting.values())
        if len(self._waits_of) < 2:
            return first + then
        ahead = Counter(self._runs_of)
        ranked = []
        for spec in then:
            ranked.append((ahead[spec.tenant], spec))
            ahead[spec.tenant] += 1
        ranked.sort(key=lambda item: item[0])  # stable: between equals, first come is first served
        return first + [spec for _, spec in ranked]


def _count_down(counter: Counter[T], key: T) -> None:
    """Names of tenants come from clients: none is kept longer than its requests."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
