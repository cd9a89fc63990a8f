"""Pods of a pipeline do not go where only the cluster's own parts go (T74)."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule

CONTROL_PLANE = frozenset({"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"})


def check(change: Change[OmniPipeline], context: Context) -> Iterator[FieldError]:
    """A profile, which the platform team writes, may say both."""
    for i, stage in enumerate(change.new.spec.stages or ()):
        if stage.scheduling is None:
            continue
        path = f"spec.stages[{i}].scheduling"
        priority = stage.scheduling.priority_class_name or ""
        if priority.startswith("system-"):
            problem = "priority classes of the system evict the cluster's own pods"
            yield FieldError(
                f"{path}.priorityClassName", priority, problem, "use a priority class of your own, or remove it"
            )
        for j, toleration in enumerate(stage.scheduling.tolerations or ()):
            where = f"{path}.tolerations[{j}]"
            if toleration.key is None:
                problem = "tolerates every taint, those of control planes and of broken nodes included"
                yield FieldError(where, "Exists", problem, "name the key of the taint that the nodes have")
            elif toleration.key in CONTROL_PLANE:
                problem = "lets pods onto control-plane nodes"
                yield FieldError(f"{where}.key", toleration.key, problem, "remove the toleration")


RULE = Rule("PrivilegedScheduling", PIPELINE, check)
