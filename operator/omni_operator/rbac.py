"""Every permission that the operator uses, and why. The Helm chart renders its ClusterRole from this table.

`kube.py` looks every call up here before it is sent, so code and RBAC cannot drift apart (T62).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omni_crds.v1alpha1.base import GROUP


@dataclass(frozen=True, slots=True)
class Rule:
    group: str
    resource: str  # with the subresource, as RBAC spells it: "omnipipelines/status"
    verbs: tuple[str, ...]
    why: str
    resource_names: tuple[str, ...] = ()
    lease_namespace_only: bool = False  # a Role in the operator's own namespace, not a ClusterRole


READ = ("get", "list", "watch")
OWN_CHILD = ("get", "list", "watch", "create", "patch", "delete")
CRD_NAMES = (f"omnipipelines.{GROUP}", f"omnistages.{GROUP}", f"omniruntimeprofiles.{GROUP}")

RULES: tuple[Rule, ...] = (
    Rule(GROUP, "omnipipelines", READ, "the desired state; its spec and metadata are never written"),
    Rule(GROUP, "omnipipelines/status", ("patch",), "conditions, stages and edges as seen"),
    Rule(GROUP, "omnistages", OWN_CHILD, "one stage pool per stage; holds the replica count"),
    Rule(GROUP, "omnistages/scale", ("patch",), "the replica count, where scaling.mode is Operator"),
    Rule(GROUP, "omnistages/status", ("patch",), "replicas and selector for /scale"),
    Rule(GROUP, "omniruntimeprofiles", READ, "images, device classes and connectors that a plan is resolved with"),
    Rule(
        "apps",
        "deployments",
        OWN_CHILD,
        "the pods of the entry and of each stage revision",
    ),
    Rule("", "pods", ("list", "watch"), "readiness, and the reason why a pod is not ready"),
    Rule("", "pods", ("patch",), "one annotation, pod-deletion-cost: which replicas leave first when a stage shrinks"),
    Rule("", "nodes", ("list",), "while a pod has no node or a stage grows: labels, taints and devices"),
    Rule("resource.k8s.io", "resourceslices", ("list",), "the same: devices that a DRA driver offers"),
    Rule("resource.k8s.io", "deviceclasses", ("list",), "the same: by which resource a pod gets them"),
    Rule("", "resourcequotas", ("list",), "while a pod has no node or a stage grows: what the namespace may ask for"),
    Rule(
        GROUP,
        "omnitenants",
        ("list",),
        "while a pod has no node or a stage grows: the tenant's budget, and its weight where devices are scarce",
    ),
    Rule("", "services", OWN_CHILD, "the API, the control channel of the entry and one headless Service per stage"),
    Rule("", "configmaps", OWN_CHILD, "the resolved plan, one immutable object per revision"),
    Rule("", "secrets", ("create",), "CURVE keys: made once, never read back"),
    Rule("", "serviceaccounts", OWN_CHILD, "identity of the pods, without a token"),
    Rule("policy", "poddisruptionbudgets", OWN_CHILD, "one replica at a time in node drains"),
    Rule(
        "networking.k8s.io",
        "networkpolicies",
        OWN_CHILD,
        "edges and control channel reachable only from the pipeline's own pods",
    ),
    Rule("events.k8s.io", "events", ("create",), "Events with fixed reasons"),
    Rule(
        "apiextensions.k8s.io",
        "customresourcedefinitions",
        ("get",),
        "refuse to act on CRDs that are older than the operator (T58)",
        resource_names=CRD_NAMES,
    ),
    Rule(
        "coordination.k8s.io",
        "leases",
        ("create", "get", "update"),
        "leadership: one operator writes at a time",
        lease_namespace_only=True,
    ),
)


class MissingPermission(AssertionError):
    """The code uses a verb that the table does not grant: a programming error, found by the first test that runs it."""


def allow(rules: Iterable[Rule], table: str) -> Callable[[str, str, str], None]:
    """The check of a process: (group, resource, verb) that `rules` do not grant raises MissingPermission."""
    allowed = frozenset((rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs)

    def check(group: str, resource: str, verb: str) -> None:
        if (group, resource, verb) not in allowed:
            raise MissingPermission(f"{verb} on {resource}.{group or 'core'} is not in {table}")

    return check


require = allow(RULES, "omni_operator.rbac.RULES")
