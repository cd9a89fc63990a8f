"""RDMA devices that connectors ask for: nodes have them or not, like accelerators."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_operator.placement import ConstraintKind, Feasible, Infeasible, Verdict, check_placement
from omni_operator.placement.demand import plan_demand
from omni_operator.placement.types import NodeView, QuotaView
from omni_runtime.deploy.plan import RdmaPlan, ResolvedPlan
from tests.unit.placement.builders import a_cluster, a_node, a_plan, catalogue, qwen
from tests.unit.placement.corpus import H100

HCA = "rdma/hca"
SPEECH = "[{name: talker, podGroup: s}, {name: code2wav, podGroup: s}]"


def by_rdma(stages: str = "[]", count: int = 1) -> ResolvedPlan:
    """Qwen3-Omni whose edges between pods go by RDMA."""
    plan = a_plan(qwen(stages))
    group = {s.name: s.pod_group for s in plan.stages}
    edges = tuple(
        msgspec.structs.replace(e, connector="Mooncake") if group[e.source] != group[e.to] else e for e in plan.edges
    )
    stages_by_rdma = tuple(msgspec.structs.replace(s, rdma=RdmaPlan((), HCA, count)) for s in plan.stages)
    return msgspec.structs.replace(plan, edges=edges, stages=stages_by_rdma)


def check(plan: ResolvedPlan, *nodes: NodeView, **more: Any) -> Verdict:
    return check_placement(plan, a_cluster(*nodes, **more), catalogue=catalogue())


def nodes(*offers: int) -> tuple[NodeView, ...]:
    return tuple(a_node(f"n{i}", H100, 8, resources={HCA: n} if n else {}) for i, n in enumerate(offers))


def test_pods_with_a_mooncake_edge_ask_for_it_and_no_others() -> None:
    asked = {d.group: d.requests.get(HCA, 0) for d in plan_demand(by_rdma(SPEECH, 2), {}, {})}
    assert asked == {"thinker": 2, "talker": 2, "entry": 0}


def test_a_node_that_offers_it_takes_them() -> None:
    verdict = check(by_rdma(), *nodes(0, 3))
    assert isinstance(verdict, Feasible)
    assert verdict.witness is not None
    assert {p.node for p in verdict.witness.placements if p.group != "entry"} == {"n1"}


@pytest.mark.parametrize(
    ("offers", "kind"),
    [
        pytest.param((0, 0), ConstraintKind.NODE_TOO_SMALL, id="no node offers any"),
        pytest.param((1, 1), ConstraintKind.CAPACITY, id="fewer than pods"),
    ],
)
def test_without_enough_the_way_out_is_tcp(offers: tuple[int, ...], kind: ConstraintKind) -> None:
    """A pod that asks for what no node has would be Pending for ever."""
    verdict = check(by_rdma(), *nodes(*offers))
    assert isinstance(verdict, Infeasible)
    assert (verdict.constraint.kind, verdict.constraint.resource) == (kind, HCA)
    assert HCA in verdict.message
    assert verdict.errors[0].fix == verdict.fixes[0].text
    assert "set connector.type of the edge thinker->talker to TCP" in verdict.fixes[0].text
    again = check_placement(verdict.fixes[0].plan, verdict.fixes[0].cluster, catalogue=catalogue())
    assert isinstance(again, Feasible), "what is offered was tried"


def test_only_the_edges_that_have_to_go_over_tcp_do() -> None:
    verdict = check(by_rdma(), *nodes(2))
    assert isinstance(verdict, Infeasible)
    fix = verdict.fixes[0]
    assert sorted(e.connector for e in fix.plan.edges) == ["Mooncake", "TCP"], fix.text


def test_a_quota_counts_it() -> None:
    verdict = check(by_rdma(), *nodes(8), quotas=(QuotaView("q", {f"requests.{HCA}": 1}),))
    assert isinstance(verdict, Infeasible)
    assert verdict.constraint.kind is ConstraintKind.QUOTA
