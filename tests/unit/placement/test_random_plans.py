"""Random pipelines on random clusters: the verdict agrees with trying every assignment, every way out leads out, every
witness passes the independent checker. Most of the time goes into the advice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest

from omni_operator.placement import (
    ClusterView,
    Feasible,
    Infeasible,
    NodeView,
    QuotaView,
    TenantView,
    check_placement,
    plan_demand,
    verify_witness,
)
from omni_operator.placement.demand import PodDemand
from omni_runtime.deploy.plan import ReplicaBounds, ResolvedPlan
from tests.unit.placement.builders import a_node, a_plan, a_taint, catalogue, qwen
from tests.unit.placement.corpus import TWO_H100

H100 = "nvidia-h100-80gb"
BASE = a_plan(qwen(TWO_H100))


def a_question(seed: int) -> tuple[ResolvedPlan, ClusterView]:
    """Two groups and the entry, at most six pods, on at most four nodes; tight in devices, CPU or both."""
    pick = random.Random(seed)
    counts = {"thinker": pick.randint(0, 2), "talker": pick.randint(0, 3)}
    bounds = {s.name: ReplicaBounds(counts[s.pod_group], 0, None) for s in BASE.stages}
    tensor = pick.choice((1, 1, 2, 4))
    stages = []
    for stage in BASE.stages:
        if stage.name == "thinker":
            device = msgspec.structs.replace(stage.device, count=tensor)
            stage = msgspec.structs.replace(stage, device=device, tensor_parallel=tensor)
        stages.append(msgspec.structs.replace(stage, cpu=pick.choice(("1", "2", "4"))))
    plan = msgspec.structs.replace(BASE, stages=tuple(stages), replicas=bounds)
    nodes = tuple(
        a_node(
            f"n{i}",
            H100 if pick.random() < 0.8 else None,
            pick.randint(1, 4),
            cpu=pick.choice((2, 6, 16)),
            memory=pick.choice((128, 256)),
            taints=(a_taint("team", "other"),) if pick.random() < 0.1 else (),
            labels={"zone": pick.choice("ab")},
            schedulable=pick.random() < 0.95,
        )
        for i in range(pick.randint(1, 4))
    )
    quotas = (QuotaView("q", {"requests.nvidia.com/gpu": pick.randint(0, 6)}),) if pick.random() < 0.2 else ()
    tenant = TenantView("t", {H100: pick.randint(0, 6)}) if pick.random() < 0.2 else None
    required = pick.random() < 0.3
    domain = "zone" if required else None
    return plan, ClusterView(nodes, quotas, tenant, domain_label=domain, domain_required=required)


def brute_force(demands: tuple[PodDemand, ...], cluster: ClusterView) -> bool:
    """Quota and budget by adding up, places by trying all of them."""
    devices = sum(d.requests.get("nvidia.com/gpu", 0) * d.replicas for d in demands)
    if any(devices > q.hard["requests.nvidia.com/gpu"] for q in cluster.quotas if devices):
        return False
    if cluster.tenant and devices and devices > cluster.tenant.budget[H100]:
        return False
    pods = [d for d in demands for _ in range(d.replicas)]
    nodes = [n for n in cluster.nodes or () if n.schedulable and not n.taints]
    return any(_holds(pods, choice, cluster) for choice in itertools.product(nodes, repeat=len(pods)))


def _holds(pods: list[PodDemand], choice: tuple[NodeView, ...], cluster: ClusterView) -> bool:
    load: dict[str, dict[str, int]] = {}
    zones = set()
    for pod, node in zip(pods, choice, strict=True):
        if any(node.labels.get(k) != v for k, v in pod.node_selector.items()):
            return False
        if cluster.domain_label and pod.group != "entry":
            zones.add(node.labels["zone"])
        for name, amount in pod.requests.items():
            row = load.setdefault(node.name, {})
            row[name] = row.get(name, 0) + amount
    fits = all(amount <= node.allocatable.get(name, 0) for node in choice for name, amount in load[node.name].items())
    return fits and len(zones) <= 1


def seeds(count: int) -> Iterator[int]:
    yield from range(count)


def agree(count: int) -> None:
    feasible = 0
    for seed in seeds(count):
        plan, cluster = a_question(seed)
        verdict = check_placement(plan, cluster, catalogue=catalogue())
        demands = plan_demand(plan, {}, {})
        assert isinstance(verdict, Feasible) == brute_force(demands, cluster), f"seed {seed}: {verdict}"
        if isinstance(verdict, Feasible):
            feasible += 1
            assert verdict.witness is not None
            assert verify_witness(verdict.witness, demands, cluster) == (), f"seed {seed}"
            continue
        assert isinstance(verdict, Infeasible)
        assert verdict.proven, f"seed {seed} is small"
        assert verdict.fixes, f"seed {seed}: {verdict.message}"
        for fix in verdict.fixes:
            after = check_placement(fix.plan, fix.cluster, catalogue=catalogue(), fixes=0)
            assert isinstance(after, Feasible), f"seed {seed}: {fix.text}"
            assert after.witness is not None
            assert verify_witness(after.witness, plan_demand(fix.plan, {}, {}), fix.cluster) == (), f"seed {seed}"
    assert count * 0.2 < feasible < count * 0.8, f"{feasible} of {count}: neither all easy nor all hopeless"


def test_60_random_pipelines_agree_with_brute_force() -> None:
    agree(60)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_2000_random_pipelines_agree_with_brute_force() -> None:
    agree(2000)
