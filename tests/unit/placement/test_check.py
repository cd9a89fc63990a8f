"""The corpus: verdict, words and advice of every case; each fix makes it feasible; each witness passes the checker."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from omni_operator.placement import (
    ClusterView,
    ConstraintKind,
    Feasible,
    FeasibleIfNodesAreAdded,
    Infeasible,
    Verdict,
    check_placement,
    plan_demand,
    verify_witness,
)
from omni_runtime.deploy.plan import ResolvedPlan
from tests.unit.placement.builders import a_cluster, a_node, a_plan, catalogue, check, example, qwen
from tests.unit.placement.corpus import CASES, H100, TWO_H100, Case


def assert_witness(plan: ResolvedPlan, cluster: ClusterView, verdict: Verdict) -> None:
    assert isinstance(verdict, Feasible)
    if cluster.nodes is not None:
        assert verdict.witness is not None
        need = {m.stage: m.need if m.known else 0 for m in verdict.memory}
        assert verify_witness(verdict.witness, plan_demand(plan, {}, need), cluster) == ()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_corpus(case: Case) -> None:
    verdict = check(case.pipeline, case.cluster)
    warned = {w.code for w in verdict.warnings}
    assert set(case.warns) <= warned, verdict.warnings
    if case.expect is None:
        assert isinstance(verdict, Feasible), getattr(verdict, "message", "")
        assert_witness(a_plan(case.pipeline), case.cluster, verdict)
        return
    assert isinstance(verdict, Infeasible)
    assert verdict.constraint.kind is case.expect, verdict.constraint
    assert verdict.proven
    for words in case.says:
        assert words in verdict.constraint.message, verdict.constraint.message
    assert verdict.errors
    assert all(e.path and e.problem and e.fix for e in verdict.errors), verdict.errors
    assert verdict.fixes, "every infeasible pipeline comes with a way out"
    assert case.advises in verdict.fixes[0].text, [f.text for f in verdict.fixes]
    for fix in verdict.fixes:
        after = check_placement(fix.plan, fix.cluster, catalogue=catalogue())
        assert isinstance(after, Feasible), f"{fix.text}: {getattr(after, 'message', '')}"
        assert_witness(fix.plan, fix.cluster, after)


def test_an_autoscaler_turns_missing_nodes_into_a_condition() -> None:
    cluster = a_cluster(a_node("h", H100, 2), nodes_may_be_added=True)
    verdict = check(example("qwen3-omni"), cluster)
    assert isinstance(verdict, FeasibleIfNodesAreAdded)
    assert [n.allocatable["nvidia.com/gpu"] for n in verdict.witness.added_nodes] == [2]
    plan = a_plan(example("qwen3-omni"))
    need = {m.stage: m.need for m in verdict.memory}
    assert verify_witness(verdict.witness, plan_demand(plan, {}, need), cluster) == ()
    assert not any("add" in fix.text for fix in verdict.fixes), "fixes are what needs no node"


def test_an_autoscaler_brings_what_no_node_is_yet() -> None:
    shape = a_node("pool-h100", H100, 8)
    cluster = a_cluster(a_node("cpu"), nodes_may_be_added=True, node_shapes=(shape,))
    verdict = check(qwen(TWO_H100), cluster)
    assert isinstance(verdict, FeasibleIfNodesAreAdded)
    assert len(verdict.witness.added_nodes) == 1
    assert verdict.witness.added_nodes[0].allocatable == shape.allocatable


def test_no_autoscaler_makes_a_device_larger() -> None:
    stages = "[{name: thinker, accelerator: {class: nvidia-l4}}]"
    verdict = check(qwen(stages), a_cluster(a_node("l", "nvidia-l4", 1), nodes_may_be_added=True))
    assert isinstance(verdict, Infeasible)


def test_the_reconciler_asks_with_the_counts_that_are_wanted_now() -> None:
    cluster = a_cluster(a_node("h", H100, 3))
    assert isinstance(check(qwen(TWO_H100), cluster), Feasible)
    verdict = check(qwen(TWO_H100), cluster, replicas={"thinker": 3})
    assert isinstance(verdict, Infeasible)
    assert "3" in verdict.message


def test_errors_point_into_the_spec() -> None:
    verdict = check(qwen("[{name: talker}, {name: thinker, accelerator: {class: nvidia-l4}}]"), a_cluster())
    assert isinstance(verdict, Infeasible)
    assert [e.path for e in verdict.errors] == ["spec.stages[1].accelerator"]
    assert verdict.errors[0].value == "1 x nvidia-l4"
    assert "GiB are missing" in verdict.errors[0].problem


def test_each_short_stage_gets_its_own_advice() -> None:
    stages = "[{name: thinker, accelerator: {class: nvidia-l4}}, {name: talker, accelerator: {class: nvidia-l4}}]"
    verdict = check(qwen(stages), a_cluster(*(a_node(f"l{i}", "nvidia-l4", 8) for i in range(3)), a_node("h", H100, 8)))
    assert isinstance(verdict, Infeasible)
    by_path = {e.path: e.fix for e in verdict.errors}
    assert "of thinker to" in by_path["spec.stages[0].accelerator"]
    assert "of talker to" in by_path["spec.stages[1].accelerator"]
    assert "talker" not in by_path["spec.stages[0].accelerator"]


def test_a_verdict_without_advice_is_the_same_verdict() -> None:
    cluster = a_cluster(a_node("h", H100, 2))
    full, quick = check(example("qwen3-omni"), cluster), check(example("qwen3-omni"), cluster, fixes=0)
    assert isinstance(full, Infeasible)
    assert isinstance(quick, Infeasible)
    assert quick.constraint == full.constraint
    assert quick.fixes == ()


def test_a_selector_that_is_too_wide_is_named() -> None:
    """Both nodes carry the label; the devices of one are smaller than what the stage needs."""
    small = a_node("small", H100, 8, labels={"nvidia.com/gpu.memory": "24576"})
    verdict = check(qwen(TWO_H100), a_cluster(a_node("h", H100, 8), small))
    assert isinstance(verdict, Feasible)
    assert any(w.code == "SelectorTooWide" and "small" in w.message for w in verdict.warnings)
    assert verdict.witness is not None
    assert {p.node for p in verdict.witness.placements if p.group != "entry"} == {"h"}


def test_the_checker_finds_what_is_wrong_with_a_witness() -> None:
    cluster = a_cluster(a_node("a", H100, 3), a_node("b", "nvidia-l4", 3))
    plan = a_plan(qwen(TWO_H100))
    verdict = check(qwen(TWO_H100), cluster)
    assert isinstance(verdict, Feasible)
    assert verdict.witness is not None
    demands = plan_demand(plan, {}, {})
    first, *rest = verdict.witness.placements
    talker = next(p for p in verdict.witness.placements if p.group == "talker")
    wrong = {
        "missing": (*rest,),
        "moved": tuple(replace(p, node="b") if p is talker else p for p in verdict.witness.placements),
        "unknown": (replace(first, node="nowhere"), *rest),
        "twice": (*verdict.witness.placements, first),
    }
    for name, placements in wrong.items():
        assert verify_witness(replace(verdict.witness, placements=placements), demands, cluster), name
    full = replace(cluster, nodes=tuple(replace(n, used=n.allocatable) for n in cluster.nodes or ()))
    assert verify_witness(verdict.witness, demands, full)
    tainted = a_cluster(*(replace(n, taints=(n.taints or ()), schedulable=False) for n in cluster.nodes or ()))
    assert verify_witness(verdict.witness, demands, tainted)


def test_stages_that_share_a_device_get_what_they_need_or_pods_of_their_own() -> None:
    """T71: the resolver refuses this sum; a stored plan of another version may have it."""
    plan = a_plan(qwen(TWO_H100))
    greedy = tuple(
        msgspec.structs.replace(s, device=msgspec.structs.replace(s.device, memory_fraction=0.8))
        if s.pod_group == "talker"
        else s
        for s in plan.stages
    )
    wrong = msgspec.structs.replace(plan, stages=greedy)
    verdict = check_placement(wrong, a_cluster(a_node("h", H100, 4)), catalogue=catalogue())
    assert isinstance(verdict, Infeasible)
    assert verdict.constraint.kind is ConstraintKind.SHARED_DEVICE
    assert "talker 0.8 + code2wav 0.8 = 1.6" in verdict.message
    texts = [fix.text for fix in verdict.fixes]
    assert texts[0].startswith("set accelerator.memoryFraction of talker to 0.")
    assert any("remove podGroup of code2wav" in text for text in texts)
    for fix in verdict.fixes:
        assert isinstance(check_placement(fix.plan, fix.cluster, catalogue=catalogue()), Feasible), fix.text
