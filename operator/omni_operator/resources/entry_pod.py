"""The pod of the entry: orchestrator and OpenAI API in one process."""

from __future__ import annotations

from omni_operator.kinds import JsonObject
from omni_operator.names import ENTRY_STAGE, REVISION_LABEL, TOPOLOGY_LABEL, stage_labels, stage_selector
from omni_operator.resources.child import Scope
from omni_operator.resources.pod import (
    DEREGISTER_SECONDS,
    EXIT_SECONDS,
    PLAN_FILE,
    container_security,
    environment,
    http_probe,
    plan_and_keys_mounts,
    plan_and_keys_volumes,
    pod_template,
)
from omni_runtime.deploy.plan import CURVE_MOUNT_PATH, ENTRY_CONTROL_PORT, ENTRY_HTTP_PORT, ResolvedPlan


def build_entry_pod(scope: Scope, plan: ResolvedPlan) -> JsonObject:
    entry = plan.entry
    container: JsonObject = {
        "name": "entry",
        "image": entry.image,
        "imagePullPolicy": entry.image_pull_policy,
        "command": ["python", "-m", "omni_runtime.entry"],
        "args": [
            *("--plan", PLAN_FILE),
            *("--curve", CURVE_MOUNT_PATH),
            *("--http-host", "0.0.0.0"),  # noqa: S104 - inside the pod; the NetworkPolicy guards it
            *("--http-port", str(ENTRY_HTTP_PORT)),
            *("--control-port", str(ENTRY_CONTROL_PORT)),
        ],
        "env": environment({"HOME": "/tmp"}),  # noqa: S108
        "ports": [
            {"name": "http", "containerPort": ENTRY_HTTP_PORT},
            {"name": "control", "containerPort": ENTRY_CONTROL_PORT},
        ],
        "startupProbe": http_probe("/livez", ENTRY_HTTP_PORT, period=1, failures=120),
        "livenessProbe": http_probe("/livez", ENTRY_HTTP_PORT, period=10, failures=6, timeout=10),
        # Ready only while every stage has a live replica (T69).
        "readinessProbe": http_probe("/ready", ENTRY_HTTP_PORT, period=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": DEREGISTER_SECONDS}}},
        "resources": {"requests": {"cpu": entry.cpu, "memory": entry.memory}, "limits": {"memory": entry.memory}},
        "securityContext": container_security(),
        "volumeMounts": plan_and_keys_mounts(),
    }
    return pod_template(
        scope,
        labels={
            **stage_labels(scope.pipeline, ENTRY_STAGE),
            REVISION_LABEL: plan.revision,
            TOPOLOGY_LABEL: plan.topology,
        },
        grace_seconds=DEREGISTER_SECONDS + plan.drain_timeout_seconds + EXIT_SECONDS,
        init_containers=[],
        containers=[container],
        volumes=plan_and_keys_volumes(scope, plan),
        node_selector=dict(entry.node_selector),
        tolerations=entry.tolerations,
        pull_secrets=entry.image_pull_secrets,
        priority_class=None,
        spread_over=stage_selector(scope.pipeline, ENTRY_STAGE),
    )
