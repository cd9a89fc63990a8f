"""What the pods of a plan ask of nodes: from the very pod templates that the operator would apply, so that the check
and the scheduler see the same numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_operator.placement.types import CPU, MEMORY, PODS, NodeView, Resources, Taint
from omni_operator.resources.child import Scope
from omni_operator.resources.deployment import ENTRY_REPLICAS
from omni_operator.resources.entry_pod import build_entry_pod
from omni_operator.resources.stage_pod import build_stage_pod
from omni_runtime.deploy.plan import ResolvedPlan, StagePlan
from omni_runtime.deploy.quantity import parse_quantity

ENTRY = "entry"
_ANY = "placement"  # names and namespace do not change what a pod asks for


@dataclass(frozen=True, slots=True)
class PodDemand:
    """All pods of one group (or of the entry): how many, what each asks for, and where it may go."""

    group: str
    stages: tuple[str, ...]
    replicas: int
    requests: Resources
    limits: Resources
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    device_resource: str | None = None
    device_class: str = ""
    device_bytes: int = 0  # what the hungriest of its stages needs of one device


class Asks:
    """What pods ask for, worked out once per group of stages: the variants of a plan share most of them.

    It depends on nothing of a plan but these (frozen) stages and the edges, so they are the key.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[object, dict[str, Any]]] = {}

    def of_group(self, scope: Scope, plan: ResolvedPlan, stages: Sequence[StagePlan]) -> dict[str, Any]:
        return self._once((*stages, plan.edges), lambda: build_stage_pod(scope, plan, stages)["spec"])

    def of_entry(self, scope: Scope, plan: ResolvedPlan) -> dict[str, Any]:
        return self._once((plan.entry,), lambda: build_entry_pod(scope, plan)["spec"])

    def _once(self, parts: Sequence[object], build: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        key = tuple(map(id, parts))
        found = self._known.get(key)
        if found is None:
            # The parts are kept beside the answer: their ids cannot be given to others meanwhile.
            found = self._known[key] = (tuple(parts), _asks(build()))
        return found[1]


def plan_demand(
    plan: ResolvedPlan, replicas: Mapping[str, int], need: Mapping[str, int], asks: Asks | None = None
) -> tuple[PodDemand, ...]:
    """replicas: by leader; without an entry, the count that the pipeline starts with. need: stage -> bytes per device.
    asks: what is known of this plan and its variants."""
    asks = asks or Asks()
    scope = Scope(plan.pipeline or _ANY, _ANY)
    found = []
    for leader, stages in plan.pod_groups().items():
        first = next((s for s in stages if s.device.resource_name), stages[0])
        found.append(
            PodDemand(
                group=leader,
                stages=tuple(s.name for s in stages),
                replicas=replicas.get(leader, plan.replicas[leader].initial if leader in plan.replicas else 1),
                device_resource=first.device.resource_name,
                device_class=first.device.device_class,
                device_bytes=max((need.get(s.name, 0) for s in stages if s.device.resource_name), default=0),
                **asks.of_group(scope, plan, stages),
            )
        )
    found.append(PodDemand(group=ENTRY, stages=(), replicas=ENTRY_REPLICAS, **asks.of_entry(scope, plan)))
    return tuple(found)


def _asks(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "requests": pod_resources(spec, "requests"),
        "limits": pod_resources(spec, "limits"),
        "node_selector": dict(spec.get("nodeSelector") or {}),
        "tolerations": tuple(spec.get("tolerations") or ()),
    }


def pod_resources(spec: Mapping[str, Any], kind: str = "requests") -> dict[str, int]:
    """Requests (or limits) of a pod, as the scheduler counts them: containers and sidecars together, or the largest
    init container beside the sidecars that started before it; plus the overhead of the runtime class."""
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or []:
        own = _container(container, kind)
        if container.get("restartPolicy") == "Always":
            running = _sum(running, own)
            peak = _largest(peak, running)
        else:
            peak = _largest(peak, _sum(running, own))
    for container in spec.get("containers") or []:
        running = _sum(running, _container(container, kind))
    total = _sum(_largest(running, peak), amounts(spec.get("overhead") or {}))
    return {**total, PODS: 1} if kind == "requests" else total


def _container(container: Mapping[str, Any], kind: str) -> dict[str, int]:
    resources = container.get("resources") or {}
    stated = amounts(resources.get(kind) or {})
    # A limit without a request is a request of the same size.
    return {**amounts(resources.get("limits") or {}), **stated} if kind == "requests" else stated


def amounts(listed: Mapping[str, Any]) -> dict[str, int]:
    """Kubernetes quantities in the unit of `types`. What does not parse is left out: it is not ours."""
    found = {}
    for name, text in listed.items():
        try:
            value = parse_quantity(str(text))
        except ValueError:
            continue
        key = name.removeprefix("requests.").removeprefix("limits.")
        found[name] = int(value * 1000) if key == CPU else int(value)
    return found


def _sum(a: Resources, b: Resources) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}


def _largest(a: Resources, b: Resources) -> dict[str, int]:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in {**a, **b}}


# ------------------------------------------------------------------------------------------------ where may it go?
def selects(demand: PodDemand, node: NodeView) -> bool:
    """The node has every label that the pod asks for."""
    return all(node.labels.get(name) == value for name, value in demand.node_selector.items())


def tolerates(demand: PodDemand, taints: Iterable[Taint]) -> bool:
    """The pod puts up with every taint that keeps pods away."""
    return all(
        any(_tolerated(taint, t) for t in demand.tolerations)
        for taint in taints
        if taint.effect in ("NoSchedule", "NoExecute")
    )


def _tolerated(taint: Taint, toleration: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    key = toleration.get("key")
    if not key:
        return toleration.get("operator") == "Exists"
    if key != taint.key:
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.value


def free(node: NodeView) -> dict[str, int]:
    """What is left of a node; never below zero, since a node may be overcommitted by pods that it had before."""
    return {name: max(0, amount - node.used.get(name, 0)) for name, amount in node.allocatable.items()}


def human(resource: str, amount: int) -> str:
    """An amount for a person: 4 CPUs, 96 GiB, 2 x nvidia.com/gpu."""
    if resource == CPU:
        return f"{amount / 1000:g} CPUs"
    if resource == MEMORY or "memory" in resource or "storage" in resource or resource.startswith("hugepages"):
        return f"{amount / (1 << 30):.1f} GiB of {resource}"
    if resource == PODS:
        return f"{amount} pods"
    return f"{amount} x {resource}"
