"""What lies around a pipeline: nodes, quotas and its tenant, read while it wants more; and who else wants the same.

One for all pipelines of the operator, because a fair share is a question about all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omni_operator.autoscale.room import Room, room_for
from omni_operator.autoscale.sharing import Claim, fair_shares
from omni_operator.autoscale.target import devices_held, pool_of
from omni_operator.autoscale.types import Decision, Spec, StageFleet
from omni_operator.fleet import FleetReader
from omni_operator.observed import Key, Observed
from omni_operator.plan.placement import missing_nodes_policy
from omni_runtime.deploy.plan import ResolvedPlan


@dataclass(slots=True)
class _Seen:
    """A pipeline at its last step. free: accelerators that nobody has, as it saw them; None: it had no need to look."""

    pool: str
    wants: int
    floor: int
    holds: int
    free: int | None = None
    short: bool = False  # it gets less than it wants


class Surroundings:
    def __init__(self, fleet: FleetReader | None) -> None:
        self._fleet = fleet
        self._seen: dict[Key, _Seen] = {}
        self._shares: dict[Key, int] = {}

    def forget(self, key: Key) -> None:
        self._seen.pop(key, None)
        self._shares.pop(key, None)

    async def room(
        self, observed: Observed, plan: ResolvedPlan, spec: Spec, fleet: Mapping[str, StageFleet], wished: Decision
    ) -> Room | None:
        """None: what is wished for takes nothing from anybody."""
        if self._fleet is None:
            return None
        key, pool = observed.key, pool_of(plan)
        if pool is not None and wished.ready:
            floor = sum((s.minimum if not s.fixed else fleet[s.name].target) * s.devices for s in spec.stages)
            self._seen[key] = _Seen(pool, wished.devices, floor, devices_held(observed, spec))
        share = self._shares.get(key)
        grows = any(s.target > s.current for s in wished.stages)
        room = Room()
        if grows:
            cluster = await self._fleet.view_with_tenant(key, observed.profiles)
            if cluster is not None:
                room = room_for(spec, plan, cluster, fleet, missing_nodes_policy(plan, observed.profiles))
                if key in self._seen and room.limits.placeable is not None:
                    self._seen[key].free = max(0, room.limits.placeable - self._seen[key].holds)
        if not grows and share is None:
            return None
        return replace(room, limits=replace(room.limits, fair_share=share))

    def tell(self, key: Key, wished: Decision, decided: Decision) -> None:
        """What became of the wish: a pipeline that gets less because of others is what makes a share of all."""
        if key in self._seen:
            self._seen[key].short = decided.devices < wished.devices

    async def share_out(self) -> None:
        """After a round: the shares of the next one, in every pool where somebody is short."""
        shares: dict[Key, int] = {}
        for pool in {s.pool for s in self._seen.values() if s.short}:
            members = {key: s for key, s in self._seen.items() if s.pool == pool}
            free = [s.free for s in members.values() if s.free is not None]
            if not free:
                continue
            claims = [await self._claim(key, seen) for key, seen in members.items()]
            found = fair_shares(claims, max(free) + sum(s.holds for s in members.values()))
            shares.update({key: found[str(key)] for key in members if str(key) in found})
        self._shares = shares

    async def _claim(self, key: Key, seen: _Seen) -> Claim:
        tenant = await self._fleet.tenant_of(key.namespace) if self._fleet is not None else None
        if tenant is None:
            return Claim(str(key), f"namespace {key.namespace}", 1, seen.wants, seen.floor)
        return Claim(str(key), f"tenant {tenant.metadata.name}", tenant.spec.weight or 1, seen.wants, seen.floor)
