"""What stops a pod, in words that a person can act on."""

from __future__ import annotations

from typing import Any

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.kinds import POD
from omni_operator.observed import Live
from omni_operator.plan.pods import problem_of

SCHEDULER = (
    "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: "
    "3 No preemption victims found for incoming pod."
)


def pending(**spec: Any) -> Live:
    blocked = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": SCHEDULER}
    body = {"metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Pending", "conditions": [blocked]}}
    return Live(POD, body)


def test_a_pod_without_a_place_says_what_it_asks_for() -> None:
    engine = {"name": "engine", "resources": {"limits": {"memory": "4Gi", "nvidia.com/gpu": "2"}}}
    problem = problem_of(pending(containers=[engine], nodeSelector={"nvidia.com/gpu.product": "H100"}))
    assert problem is not None
    assert problem.reason is Reason.UNSCHEDULABLE
    assert problem.message == (
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu "
        "(needs 2 x nvidia.com/gpu on a node labelled nvidia.com/gpu.product=H100)"
    )


def test_a_pod_that_asks_for_no_device_has_the_schedulers_words_alone() -> None:
    problem = problem_of(pending(containers=[{"name": "entry", "resources": {"limits": {"memory": "1Gi"}}}]))
    assert problem is not None
    assert problem.message == "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
