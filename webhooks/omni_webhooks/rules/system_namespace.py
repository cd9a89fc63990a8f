"""The cluster's own namespaces are nobody's tenant."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.kinds import TENANT
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule

SYSTEM = frozenset({"kube-system", "kube-public", "kube-node-lease"})


def check(change: Change[OmniTenant], context: Context) -> Iterator[FieldError]:
    for i, namespace in enumerate(change.new.spec.namespaces):
        if namespace in SYSTEM:
            problem = "a namespace of Kubernetes itself, in which nothing of ours is checked or run"
            yield FieldError(f"spec.namespaces[{i}]", namespace, problem, "remove it")


RULE = Rule("SystemNamespace", TENANT, check)
