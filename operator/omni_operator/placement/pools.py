"""Devices that the pod groups of a plan ask for, by class: what budgets are compared with. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from omni_runtime.deploy.plan import ResolvedPlan


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """Devices of one pod group. initial: replicas that it starts with; maximum: None where no bound is set."""

    leader: str
    device_class: str
    devices: int
    initial: int
    maximum: int | None


def demand_of(plan: ResolvedPlan) -> tuple[PoolDemand, ...]:
    """Pod groups that need accelerators. Stages of one group share the devices of the one that has most."""
    pools = []
    for leader, members in plan.pod_groups().items():
        with_devices = [m for m in members if m.device.resource_name is not None]
        if with_devices:
            largest = max(with_devices, key=lambda m: m.device.count)
            bounds = plan.replicas[leader]
            pools.append(
                PoolDemand(leader, largest.device.device_class, largest.device.count, bounds.initial, bounds.maximum)
            )
    return tuple(pools)
