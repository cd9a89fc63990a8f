"""The replicas' side of the orchestrator: their messages become events of requests; signs of life, silence and loss.

One ROUTER with CURVE. What a request does with an event is not decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import UpstreamLost
from omni_runtime.orchestrator.events import Event, ReplicaGone
from omni_runtime.orchestrator.messages import event_of
from omni_runtime.orchestrator.observer import Observer
from omni_runtime.orchestrator.pool import LivenessRules, LostReplica, Policy
from omni_runtime.orchestrator.power import PowerSwitch
from omni_runtime.orchestrator.roster import Roster
from omni_runtime.orchestrator.state import StageRecord
from omni_runtime.orchestrator.values import ReplicaId, RequestId, StageName
from omni_runtime.orchestrator.wire import ControlSocket
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels


class Requests(Protocol):
    """The requests' side."""

    def dispatch(self, request: RequestId, event: Event) -> None: ...
    def record_of(self, request: RequestId, stage: StageName) -> StageRecord | None:
        """None: the request is unknown, or has no part in that stage."""

    def places_changed(self) -> None: ...
    def ticked(self, now: float) -> None: ...


class ReplicaSide:
    def __init__(
        self,
        plan: ResolvedPlan,
        name: str,
        liveness: LivenessRules,
        policy: Policy,
        observer: Observer,
        requests: Requests,
        clock: Callable[[], float],
    ) -> None:
        self.roster = Roster(plan, liveness, policy, observer)
        self.power = PowerSwitch(self.roster, self.send)
        self._plan = plan
        self._name = name
        self._liveness = liveness
        self._observer = observer
        self._requests = requests
        self._clock = clock
        self._socket: ControlSocket
        self.tasks: list[asyncio.Task[None]] = []

    def open(self, channels: Channels, endpoint: str) -> None:
        self._socket = ControlSocket(channels, endpoint)
        self.tasks = [asyncio.create_task(self._socket.receive(self._take)), asyncio.create_task(self._tick())]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._socket.close()

    @property
    def port(self) -> int:
        return self._socket.port

    def send(self, stage: StageName, replica: ReplicaId, message: control.OrchestratorMessage) -> bool:
        """False: the replica is unknown, or its connection is closed."""
        member = self.roster.get(stage, replica)
        if member is None:
            return False
        if self._socket.send(member.peer, message):
            return True
        self.roster.unreachable(stage, member, self._clock())
        return False

    # --- what replicas say

    def _take(self, peer: bytes, message: control.StageMessage) -> None:
        now = self._clock()
        self._observer.message_received(type(message).__name__)
        if isinstance(message, control.Hello):
            self._welcome(peer, message, now)
            return
        member = self.roster.member_of(peer)
        if member is None:
            self._socket.send(peer, control.Refused("not registered; say hello first"))
        elif isinstance(message, control.Heartbeat):
            if self.roster.heartbeat(member, message, now):
                self._requests.places_changed()
            self._reconcile(*member, message)
        elif isinstance(message, control.Leaving):
            self.roster.leave(member, message.reason, now)
        elif isinstance(message, control.PowerChanged):
            self.roster.power_changed(member, message.asleep, now)
            self.power.answered(member, message)
            self._requests.places_changed()
        else:
            stage, replica = member
            self.roster.pools[stage].heard(replica, now)
            if isinstance(message, control.StageFailed) and message.code == UpstreamLost.code:
                self._blame_upstream(RequestId(message.request), stage)
            self._requests.dispatch(RequestId(message.request), event_of(stage, replica, message))

    def _welcome(self, peer: bytes, hello: control.Hello, now: float) -> None:
        answer = self.roster.welcome(peer, hello, now)
        if isinstance(answer, control.Refused):
            self._socket.send(peer, answer)
            return
        self._socket.send(peer, control.Welcome(self._name, self._liveness.heartbeat_seconds))
        if answer.lost is not None:
            self._tell_lost(answer.lost)
        self._requests.places_changed()

    def _blame_upstream(self, request: RequestId, stage: StageName) -> None:
        """A consumer notices a dead producer before we do. If the producer is gone, the client hears of that replica,
        not of whoever waited for it."""
        for source in (e.source for e in self._plan.edges if e.to == stage):
            record = self._requests.record_of(request, source)
            member = self.roster.get(source, record.replica) if record is not None else None
            if member is not None:
                self.send(source, member.id, self.roster.last_ping())
                if member.unreachable_since is not None:
                    self._requests.dispatch(request, ReplicaGone(source, member.id, "closed its connection"))

    def _reconcile(self, stage: StageName, replica: ReplicaId, beat: control.Heartbeat) -> None:
        """Requests that only one side knows of: the replica drops ours that ended, we fail those that it lost."""
        if beat.requests is None:
            return
        for request in beat.requests:
            if self._requests.record_of(RequestId(request), stage) is None:
                self.send(stage, replica, control.Abort(request, "unknown to this orchestrator"))
        for lost in self.roster.pools[stage].forgotten(replica, beat):
            self._requests.dispatch(lost, ReplicaGone(stage, replica, "no longer knows the request"))

    # --- what they do not say

    async def _tick(self) -> None:
        interval = self._liveness.heartbeat_seconds
        before = self._clock()
        while True:
            await asyncio.sleep(interval)
            now = self._clock()
            stall, before = now - before - interval, now
            if stall > interval:  # we slept, not they: their heartbeats wait in our socket
                self.roster.excuse(stall)
            ping = self.roster.next_ping()
            for stage, replica in self.roster.members():
                self.send(stage, replica.id, ping)
            for lost in self.roster.expire(now):
                self._tell_lost(lost)
            self._requests.ticked(now)

    def _tell_lost(self, lost: LostReplica) -> None:
        """Only the requests that were bound to it hear of it; others go on."""
        for request in lost.requests:
            self._requests.dispatch(request, ReplicaGone(lost.stage, lost.replica, lost.reason))
