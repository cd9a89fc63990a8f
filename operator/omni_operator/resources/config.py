"""The ConfigMap with the resolved plan (one per revision), the CURVE Secret and the ServiceAccount."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from omni_operator.kinds import CONFIG_MAP, SECRET, SERVICE_ACCOUNT
from omni_operator.names import REVISION_LABEL, curve_name, plan_name, service_account_name
from omni_operator.resources.child import Child, Scope, build_child
from omni_runtime.deploy.plan import ResolvedPlan, canonical_json

PLAN_KEY = "plan.json"


def build_plan_config_map(scope: Scope, plan: ResolvedPlan) -> Child:
    """Immutable, so it holds only what the revision is the hash of: replica bounds and origins are left out."""
    stable = msgspec.structs.replace(plan, replicas={}, origins={})
    return build_child(
        CONFIG_MAP,
        scope,
        plan_name(scope.pipeline, plan.revision),
        {"immutable": True, "data": {PLAN_KEY: canonical_json(stable).decode()}},
        labels={REVISION_LABEL: plan.revision},
    )


def build_curve_secret(scope: Scope, files: Mapping[str, str]) -> Child:
    """Created once and never read: the operator has no permission to get Secrets (T62)."""
    return build_child(
        SECRET,
        scope,
        curve_name(scope.pipeline),
        {"type": "Opaque", "immutable": True, "stringData": dict(files)},
    )


def build_service_account(scope: Scope) -> Child:
    """An identity without a token: no process of a pipeline talks to the API server."""
    return build_child(
        SERVICE_ACCOUNT, scope, service_account_name(scope.pipeline), {"automountServiceAccountToken": False}
    )
