"""Sleep and wake of all replicas: asks each, waits for each answer, reports. What runs is the caller's concern."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from omni_runtime.orchestrator.roster import Member, Roster
from omni_runtime.orchestrator.values import ReplicaId, StageName
from omni_runtime.protocol import control

Send = Callable[[StageName, ReplicaId, control.OrchestratorMessage], bool]


class ReplicaPower(msgspec.Struct, frozen=True, rename="camel"):
    stage: str
    replica: str
    asleep: bool
    problem: str = ""  # why it is not what was asked for


class PowerSwitch:
    """One change at a time; a later one of the same replica takes over the wait of an earlier one."""

    def __init__(self, roster: Roster, send: Send) -> None:
        self._roster = roster
        self._send = send
        self._waiting: dict[Member, asyncio.Future[control.PowerChanged]] = {}

    def answered(self, member: Member, message: control.PowerChanged) -> None:
        future = self._waiting.pop(member, None)
        if future is not None and not future.done():
            future.set_result(message)

    async def change(self, *, asleep: bool, seconds: float) -> tuple[ReplicaPower, ...]:
        """Every replica that is there; one that does not answer within `seconds` is reported as a problem."""
        members = [(stage, replica.id) for stage, replica in self._roster.members()]
        return tuple(await asyncio.gather(*(self._change_one(m, asleep, seconds) for m in members)))

    async def _change_one(self, member: Member, asleep: bool, seconds: float) -> ReplicaPower:
        stage, replica = member
        before = self._roster.get(stage, replica)
        was = before is not None and before.asleep
        future: asyncio.Future[control.PowerChanged] = asyncio.get_running_loop().create_future()
        self._waiting[member] = future
        if not self._send(stage, replica, control.Sleep() if asleep else control.Wake()):
            self._waiting.pop(member, None)
            return ReplicaPower(stage, replica, was, "its connection is closed")
        try:
            answer = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            if self._waiting.get(member) is future:
                del self._waiting[member]
            return ReplicaPower(stage, replica, was, f"no answer within {seconds:g} s")
        return ReplicaPower(stage, replica, answer.asleep, answer.problem)

    def asleep(self) -> tuple[Member, ...]:
        return tuple((stage, r.id) for stage, r in self._roster.members() if r.asleep)
