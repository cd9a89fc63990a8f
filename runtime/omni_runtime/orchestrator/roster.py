"""Roster: the pools of all stages, and which replica speaks on which connection. No sockets, no requests' states.

What it answers are values; the loop sends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.observer import Observer
from omni_runtime.orchestrator.pool import LivenessRules, LostReplica, Policy, Replica, StagePool
from omni_runtime.orchestrator.registration import refusal_of
from omni_runtime.orchestrator.values import Instant, ReplicaId, RequestId, StageName
from omni_runtime.protocol import control

log = get_logger(__name__)

REFUSAL_LOG_SECONDS = 30.0  # a replica of another revision tries again and again

Member = tuple[StageName, ReplicaId]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A Hello was right. `lost`: an earlier process under the same id, with its requests."""

    lost: LostReplica | None


class Roster:
    def __init__(self, plan: ResolvedPlan, rules: LivenessRules, policy: Policy, observer: Observer) -> None:
        self._plan = plan
        self._observer = observer
        self.pools = {s.name: StagePool(s.name, rules, policy) for s in plan.stages}
        self._peers: dict[bytes, Member] = {}
        self._refusals: dict[str, Instant] = {}
        self._pings = 0

    # --- membership

    def welcome(self, peer: bytes, hello: control.Hello, now: Instant) -> Admitted | control.Refused:
        reason = refusal_of(hello, self._plan)
        if reason is not None:
            self._note_refusal(hello, reason, now)
            return control.Refused(reason)
        pool = self.pools[hello.stage]
        known = pool.get(hello.replica)
        lost = pool.join(hello, peer, now)
        if known is not None and known.peer != peer:
            self._peers.pop(known.peer, None)
        self._peers[peer] = (hello.stage, hello.replica)
        self._observer.replica_joined(hello.stage, hello.replica)
        if known is None or lost is not None:
            log.info("replica.joined", stage=hello.stage, replica=hello.replica, capacity=hello.capacity)
        self.note(hello.stage, now)
        return Admitted(lost)

    def member_of(self, peer: bytes) -> Member | None:
        """None: unknown, or given up; it has to say hello."""
        member = self._peers.get(peer)
        return member if member is not None and self.get(*member) is not None else None

    def heartbeat(self, member: Member, beat: control.Heartbeat, now: Instant) -> bool:
        """True: replicas that may get work have changed."""
        stage, replica = member
        pool = self.pools[stage]
        before = len(pool.live(now))
        pool.heartbeat(replica, beat, now)
        changed = len(pool.live(now)) != before
        if changed:
            self.note(stage, now)
        return changed

    def power_changed(self, member: Member, asleep: bool, now: Instant) -> None:
        stage, replica = member
        found = self.get(stage, replica)
        if found is not None:
            found.asleep = asleep
            self.note(stage, now)

    def next_ping(self) -> control.Ping:
        """For all replicas."""
        self._pings += 1
        for pool in self.pools.values():
            pool.pinged(self._pings)
        return control.Ping(self._pings)

    def last_ping(self) -> control.Ping:
        """For one replica out of turn: a new number would speak for the others as well."""
        return control.Ping(self._pings)

    def leave(self, member: Member, reason: str, now: Instant) -> None:
        stage, replica = member
        log.info("replica.leaving", stage=stage, replica=replica, reason=reason)
        self.pools[stage].leave(replica)
        self.note(stage, now)

    def unreachable(self, stage: StageName, member: Replica, now: Instant) -> None:
        if member.unreachable_since is None:
            log.info("replica.unreachable", stage=stage, replica=member.id)
        self.pools[stage].unreachable(member.id, now)

    def excuse(self, seconds: float) -> None:
        for pool in self.pools.values():
            pool.excuse(seconds)

    def expire(self, now: Instant) -> tuple[LostReplica, ...]:
        lost = tuple(gone for pool in self.pools.values() for gone in pool.expire(now))
        for gone in lost:
            level = log.warning if gone.requests else log.info
            level(
                "replica.lost", stage=gone.stage, replica=gone.replica, reason=gone.reason, requests=len(gone.requests)
            )
            self._observer.replica_gone(gone.stage, gone.replica, now)
        self._peers = {p: m for p, m in self._peers.items() if self._speaks(p, m)}
        for stage in self.pools:
            self.note(stage, now)
        return lost

    # --- binding

    def free(self, now: Instant) -> dict[StageName, int]:
        """Places per stage over all replicas that may get work."""
        return {name: sum(r.free for r in pool.candidates(now)) for name, pool in self.pools.items()}

    def bind(
        self, request: RequestId, stages: Iterable[StageName], now: Instant, session: str = ""
    ) -> tuple[tuple[StageName, ReplicaId], ...] | None:
        """One replica of each stage, or none at all."""
        bindings: list[tuple[StageName, ReplicaId]] = []
        for stage in stages:
            replica = self.pools[stage].bind(request, now, session)
            if replica is None:
                for name, bound in bindings:
                    self.pools[name].release(request, bound)
                return None
            bindings.append((stage, replica.id))
        return tuple(bindings)

    # --- views

    def get(self, stage: StageName, replica: ReplicaId) -> Replica | None:
        return self.pools[stage].get(replica)

    def members(self) -> Iterator[tuple[StageName, Replica]]:
        for stage, pool in self.pools.items():
            for replica in tuple(pool.members):
                yield stage, replica

    def hello_of(self, stage: StageName, replica: ReplicaId) -> control.Hello:
        member = self.get(stage, replica)
        assert member is not None, "a replica that was bound in this very step is in its pool"
        return member.hello

    def states(self, stage: StageName, now: Instant) -> tuple[str, ...]:
        pool = self.pools[stage]
        return tuple(pool.state_of(r, now).value for r in pool.members)

    def note(self, stage: StageName, now: Instant) -> None:
        pool = self.pools[stage]
        self._observer.replicas_changed(stage, len(pool.live(now)), len(tuple(pool.members)))

    def _speaks(self, peer: bytes, member: Member) -> bool:
        replica = self.get(*member)
        return replica is not None and replica.peer == peer

    def _note_refusal(self, hello: control.Hello, reason: str, now: Instant) -> None:
        self._observer.replica_refused(hello.stage if hello.stage in self.pools else "unknown")
        key = f"{hello.stage}/{hello.replica}"
        if now - self._refusals.get(key, -REFUSAL_LOG_SECONDS) >= REFUSAL_LOG_SECONDS:
            self._refusals = {k: t for k, t in self._refusals.items() if now - t < REFUSAL_LOG_SECONDS}
            self._refusals[key] = now
            log.warning("replica.refused", stage=hello.stage, replica=hello.replica, reason=reason)
