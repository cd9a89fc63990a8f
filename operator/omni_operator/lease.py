"""Leadership by a coordination.k8s.io Lease: acquire, renew, fence, release.

Written here because the official client's elector does not fence, has no request timeout and never releases. The rules:
- a leader counts itself deposed `renew_deadline` after the *start* of its last good renewal, which is earlier than anybody
  else may take over (`duration` after they saw the record change, on their own clock: wall clocks are not compared);
- every write batch asks `check()` first; on loss the work stops, then the process ends and is restarted clean;
- a clean stop releases, so that the successor starts at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from omni_operator import logs, metrics
from omni_operator.errors import KubeError, LeadershipLost, NotFound
from omni_operator.kinds import LEASE, JsonObject
from omni_operator.kube import KubeApi


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Seconds. request + retry < renew_deadline < duration, or two could lead at once.

    Longer than usual: the API server of a small node that loads a model answers late, and a deposed operator restarts.
    A clean end hands over at once; only the loss of a node waits for `duration`.
    """

    duration: float = 30.0
    renew_deadline: float = 22.0
    retry: float = 4.0
    request: float = 8.0

    def __post_init__(self) -> None:
        if not self.request + self.retry < self.renew_deadline < self.duration:
            raise ValueError(f"request + retry < renew_deadline < duration must hold, not {self}")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record of the Lease and when we first saw it, on our monotonic clock."""

    holder: str
    renewed: str
    seen_at: float


def may_take(lease: JsonObject | None, sighting: Sighting | None, identity: str, now: float) -> bool:
    """May we write ourselves into this Lease? Pure."""
    if lease is None:
        return True
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if holder in ("", identity):
        return True
    if sighting is None or (sighting.holder, sighting.renewed) != (holder, spec.get("renewTime") or ""):
        return False
    return now - sighting.seen_at >= float(spec.get("leaseDurationSeconds") or 0)


def next_spec(lease: JsonObject | None, identity: str, timing: LeaseTiming, wall: datetime) -> JsonObject:
    """The Lease's spec with us as holder. Pure."""
    old = (lease or {}).get("spec") or {}
    stamp = wall.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    same = old.get("holderIdentity") == identity
    transitions = int(old.get("leaseTransitions") or 0)
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(timing.duration),
        "acquireTime": old.get("acquireTime") or stamp if same else stamp,
        "renewTime": stamp,
        "leaseTransitions": transitions if same or lease is None else transitions + 1,
    }


class LeaseLoop:
    def __init__(
        self,
        kube: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        timing: LeaseTiming | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._timing = timing or LeaseTiming()
        self._monotonic = monotonic
        self._wall = wall
        self._sleep = sleep
        self._sighting: Sighting | None = None
        self._renewed_at: float | None = None  # start of the last good renewal; None: not the leader
        self.acquired = asyncio.Event()

    def check(self) -> None:
        """The fence. Raises LeadershipLost unless nobody else can possibly lead now."""
        if self._renewed_at is None:
            raise LeadershipLost("the Lease is not held")
        if self._monotonic() - self._renewed_at > self._timing.renew_deadline:
            raise LeadershipLost("the Lease could not be renewed in time")

    async def run(self) -> None:
        """Acquire, then renew until it is lost. Returns only by LeadershipLost or cancellation."""
        while True:
            started = self._monotonic()
            try:
                async with asyncio.timeout(self._timing.request):
                    held = await self._try_once(started)
            except (KubeError, TimeoutError) as error:
                held = None
                logs.warning("lease.request_failed", error=str(error), leading=self._renewed_at is not None)
            if held and not self.acquired.is_set():
                logs.info("lease.acquired", lease=f"{self._namespace}/{self._name}", identity=self._identity)
                metrics.LEADER.set(1)
                self.acquired.set()
            if self.acquired.is_set():
                if held is False:
                    self._lose("another process holds the Lease")
                try:
                    self.check()
                except LeadershipLost as error:
                    self._lose(str(error))
            await self._sleep(self._timing.retry * random.uniform(0.8, 1.0))

    async def release(self) -> None:
        """Give the Lease back, after the work has stopped. Failure only costs the successor some seconds."""
        if self._renewed_at is None:
            return
        self._renewed_at = None
        metrics.LEADER.set(0)
        try:
            async with asyncio.timeout(self._timing.request):
                lease = await self._kube.get(LEASE, self._namespace, self._name)
                if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._kube.replace(LEASE, self._namespace, self._name, lease)
        except (KubeError, TimeoutError) as error:
            logs.warning("lease.release_failed", error=str(error))

    def _lose(self, why: str) -> None:
        self._renewed_at = None
        metrics.LEADER.set(0)
        logs.error("lease.lost", reason=why)
        raise LeadershipLost(why)

    async def _try_once(self, started: float) -> bool:
        """True: held from `started` on. False: somebody else holds it."""
        try:
            lease: JsonObject | None = await self._kube.get(LEASE, self._namespace, self._name)
        except NotFound:
            lease = None
        self._remember(lease)
        if not may_take(lease, self._sighting, self._identity, self._monotonic()):
            return False
        spec = next_spec(lease, self._identity, self._timing, self._wall())
        if lease is None:
            body: JsonObject = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": spec,
            }
            await self._kube.create(LEASE, self._namespace, body)
        else:
            # The resourceVersion inside makes this a compare-and-swap.
            await self._kube.replace(LEASE, self._namespace, self._name, {**lease, "spec": spec})
        self._renewed_at = started
        return True

    def _remember(self, lease: JsonObject | None) -> None:
        spec = (lease or {}).get("spec") or {}
        holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
        if self._sighting is None or (self._sighting.holder, self._sighting.renewed) != (holder, renewed):
            self._sighting = Sighting(holder, renewed, self._monotonic())
