"""StagePool: the replicas of one stage. Who is in, who may get work, who is bound to what. No I/O; time is a parameter.

A replica joins by Hello, lives by heartbeats, is suspect when it is silent (no new work), and lost after a longer
silence (its requests fail, others go on). A lost replica that speaks again is used again (R35). A binding is sticky:
one replica per request and stage, from submit to end (T70).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from omni_runtime.orchestrator.values import Instant, ReplicaId, RequestId, StageName
from omni_runtime.protocol.control import Heartbeat, Hello, StageLoad

FORGOTTEN_BEATS = 3


class ReplicaState(StrEnum):
    LIVE = "Live"
    SUSPECT = "Suspect"  # silent or unhealthy: keeps its requests, gets none
    ASLEEP = "Asleep"  # its engine gave its memory back: gets none until it is woken
    DRAINING = "Draining"  # said Leaving: keeps its requests, gets none


@dataclass(slots=True)
class Binding:
    pinged: int  # number of the last Ping before the Submit
    misses: int = 0  # heartbeats in a row that should know the request and do not


@dataclass(slots=True)
class Replica:
    hello: Hello
    peer: bytes  # routing id of its connection
    joined_at: Instant
    last_seen: Instant
    draining: bool = False
    asleep: bool = False
    unreachable_since: Instant | None = None  # its connection is closed
    unhealthy: str = ""
    load: StageLoad = field(default_factory=StageLoad)
    bound: dict[RequestId, Binding] = field(default_factory=dict)
    served: int = 0

    @property
    def id(self) -> ReplicaId:
        return self.hello.replica

    @property
    def free(self) -> int:
        return self.hello.capacity - len(self.bound)


@dataclass(frozen=True, slots=True)
class LivenessRules:
    heartbeat_seconds: float = 0.5
    suspect_seconds: float = 3.0  # of silence
    lost_seconds: float = 20.0  # of silence: a busy host may stall a healthy process for seconds
    unreachable_seconds: float = 0.8  # of a closed connection: a dead process, or one that has not dialled again

    def state_of(self, replica: Replica, now: Instant) -> ReplicaState:
        if replica.draining:
            return ReplicaState.DRAINING
        silent = now - replica.last_seen > self.suspect_seconds
        if silent or replica.unreachable_since is not None or replica.unhealthy:
            return ReplicaState.SUSPECT
        return ReplicaState.ASLEEP if replica.asleep else ReplicaState.LIVE

    def loss_reason(self, replica: Replica, now: Instant) -> str | None:
        if replica.unreachable_since is not None and now - replica.unreachable_since >= self.unreachable_seconds:
            return "closed its connection and did not come back"
        if now - replica.last_seen >= self.lost_seconds:
            return f"sent no heartbeat for {self.lost_seconds:g} s"
        return None


@dataclass(frozen=True, slots=True)
class LostReplica:
    stage: StageName
    replica: ReplicaId
    reason: str
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Who needs a replica. turn: how many were chosen before; session: "" if the client named none."""

    turn: int
    request: RequestId
    session: str = ""


Policy = Callable[[tuple[Replica, ...], Ask], Replica]


class StagePool:
    """Replicas and bindings of one stage."""

    def __init__(self, stage: StageName, rules: LivenessRules, policy: Policy) -> None:
        self.stage = stage
        self._rules = rules
        self._policy = policy
        self._replicas: dict[ReplicaId, Replica] = {}
        self._turn = 0
        self._pinged = 0

    # --- membership

    def join(self, hello: Hello, peer: bytes, now: Instant) -> LostReplica | None:
        """Admit a replica, or refresh it when it says hello again.

        The same process on a new connection keeps its requests; a new process under an old id (a restarted
        container keeps its pod's uid) has none of them, so they are returned as lost.
        """
        old = self._replicas.get(hello.replica)
        lost = None
        if old is not None:
            same_process = old.peer == peer or (hello.incarnation and hello.incarnation == old.hello.incarnation)
            if same_process and hello.incarnation == old.hello.incarnation:
                old.hello, old.peer, old.last_seen, old.unreachable_since = hello, peer, now, None
                return None
            lost = self._remove(old, "was restarted")
        self._replicas[hello.replica] = Replica(hello, peer, joined_at=now, last_seen=now)
        return lost

    def heartbeat(self, replica: ReplicaId, beat: Heartbeat, now: Instant) -> None:
        member = self._replicas.get(replica)
        if member is None:
            return
        member.last_seen, member.unreachable_since, member.load = now, None, beat.load
        member.asleep = beat.asleep
        member.unhealthy = "" if beat.healthy else (beat.detail or "unhealthy")

    def forgotten(self, replica: ReplicaId, beat: Heartbeat) -> tuple[RequestId, ...]:
        """Requests that are bound to the replica, but that it does not know: a terminal message was lost (R6).

        A heartbeat says something about a request only if it answers a Ping that was sent after the Submit: on a busy
        host a Submit may be on its way for longer than any number of heartbeats takes.
        """
        member = self._replicas.get(replica)
        if member is None or beat.requests is None:
            return ()
        held = set(beat.requests)
        for request, binding in member.bound.items():
            if request in held:
                binding.misses = 0
            elif beat.answers > binding.pinged:
                binding.misses += 1
        return tuple(r for r, binding in member.bound.items() if binding.misses >= FORGOTTEN_BEATS)

    def pinged(self, number: int) -> None:
        """Every replica is being sent the Ping of this number; they only grow."""
        self._pinged = number

    def heard(self, replica: ReplicaId, now: Instant) -> None:
        member = self._replicas.get(replica)
        if member is not None:
            member.last_seen, member.unreachable_since = now, None

    def unreachable(self, replica: ReplicaId, now: Instant) -> None:
        """Its connection is closed; work it already has may still end if it dials again in time."""
        member = self._replicas.get(replica)
        if member is not None and member.unreachable_since is None:
            member.unreachable_since = now

    def excuse(self, seconds: float) -> None:
        """Silence that was our own: this process could not listen for so long."""
        for member in self._replicas.values():
            member.last_seen += seconds

    def leave(self, replica: ReplicaId) -> None:
        """Drain: nothing new; what is bound goes on (T44)."""
        member = self._replicas.get(replica)
        if member is not None:
            member.draining = True

    def expire(self, now: Instant) -> tuple[LostReplica, ...]:
        """Remove who was silent for too long. A draining replica that left with nothing bound is no loss."""
        lost = []
        for member in tuple(self._replicas.values()):
            reason = self._rules.loss_reason(member, now)
            if reason is not None:
                lost.append(self._remove(member, reason))
        return tuple(lost)

    def _remove(self, member: Replica, reason: str) -> LostReplica:
        del self._replicas[member.id]
        return LostReplica(self.stage, member.id, reason, tuple(member.bound))

    # --- binding

    def candidates(self, now: Instant) -> tuple[Replica, ...]:
        """Replicas that may get one more request."""
        return tuple(r for r in self.live(now) if r.free > 0)

    def bind(self, request: RequestId, now: Instant, session: str = "") -> Replica | None:
        """Bind a request to one replica, the same one every time it is asked (T70). None: no free place."""
        for member in self._replicas.values():
            if request in member.bound:
                return member
        candidates = self.candidates(now)
        if not candidates:
            return None
        chosen = self._policy(candidates, Ask(self._turn, request, session))
        chosen.bound[request] = Binding(self._pinged)
        chosen.served += 1
        self._turn += 1
        return chosen

    def release(self, request: RequestId, replica: ReplicaId) -> None:
        member = self._replicas.get(replica)
        if member is not None:
            member.bound.pop(request, None)

    # --- views

    def live(self, now: Instant) -> tuple[Replica, ...]:
        return tuple(r for r in self._replicas.values() if self._rules.state_of(r, now) is ReplicaState.LIVE)

    def state_of(self, member: Replica, now: Instant) -> ReplicaState:
        return self._rules.state_of(member, now)

    def get(self, replica: ReplicaId) -> Replica | None:
        return self._replicas.get(replica)

    @property
    def members(self) -> Iterable[Replica]:
        return self._replicas.values()
