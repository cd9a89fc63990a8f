"""The parts that all our pods have: Pod Security "restricted", downward environment, volumes, probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omni_operator.kinds import JsonObject
from omni_operator.names import PIPELINE_ANNOTATION, curve_name, plan_name, service_account_name
from omni_operator.resources.child import Scope
from omni_runtime.deploy.plan import CURVE_MOUNT_PATH, PLAN_MOUNT_PATH, ResolvedPlan

RUN_AS = 65532
# Between the end of the drain and SIGKILL: flushing the last chunks and exiting (T45).
EXIT_SECONDS = 30
# Endpoints need a moment to forget a pod; until then the entry still accepts (T44).
DEREGISTER_SECONDS = 5

PLAN_FILE = f"{PLAN_MOUNT_PATH}/plan.json"

# Values that only the kubelet knows.
DOWNWARD: Mapping[str, str] = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_UID": "metadata.uid",
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
}


def container_security() -> JsonObject:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def locking_security() -> JsonObject:
    """Of a container that may lock memory. Kubernetes gives a capability to root alone, so it starts as root, and with
    the other one becomes RUN_AS itself."""
    return {
        **container_security(),
        "runAsNonRoot": False,
        "runAsUser": 0,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK", "SETUID"]},
    }


def environment(values: Mapping[str, str]) -> list[JsonObject]:
    """Downward values first: `$(POD_IP)` in arguments and later variables may refer to them."""
    downward: list[JsonObject] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in DOWNWARD.items()
    ]
    return downward + [{"name": k, "value": v} for k, v in values.items() if k not in DOWNWARD]


def http_probe(path: str, port: int, *, period: int, failures: int, timeout: int = 5) -> JsonObject:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def plan_and_keys_volumes(scope: Scope, plan: ResolvedPlan) -> list[JsonObject]:
    return [
        {"name": "plan", "configMap": {"name": plan_name(scope.pipeline, plan.revision)}},
        # Group-readable for the fsGroup; never for others.
        {"name": "curve", "secret": {"secretName": curve_name(scope.pipeline), "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]


def plan_and_keys_mounts() -> list[JsonObject]:
    return [
        {"name": "plan", "mountPath": PLAN_MOUNT_PATH, "readOnly": True},
        {"name": "curve", "mountPath": CURVE_MOUNT_PATH, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own emptyDir
    ]


def pod_template(
    scope: Scope,
    *,
    labels: Mapping[str, str],
    grace_seconds: int,
    init_containers: Sequence[JsonObject],
    containers: Sequence[JsonObject],
    volumes: Sequence[JsonObject],
    node_selector: Mapping[str, str],
    tolerations: Sequence[Mapping[str, str]],
    pull_secrets: Sequence[str],
    priority_class: str | None,
    spread_over: Mapping[str, str],
) -> JsonObject:
    spec: JsonObject = {
        "serviceAccountName": service_account_name(scope.pipeline),
        "automountServiceAccountToken": False,
        # No SERVICE_PORT variables: a Service called `vllm` would set VLLM_PORT, which vLLM reads as its own.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": RUN_AS,
            "runAsGroup": RUN_AS,
            "fsGroup": RUN_AS,
            # A volume of weights is not walked file by file at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(spread_over)},
            }
        ],
        "containers": list(containers),
        "volumes": list(volumes),
    }
    if init_containers:
        spec["initContainers"] = list(init_containers)
    if node_selector:
        spec["nodeSelector"] = dict(node_selector)
    if tolerations:
        spec["tolerations"] = [dict(t) for t in tolerations]
    if pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    if priority_class:
        spec["priorityClassName"] = priority_class
    return {
        "metadata": {"labels": dict(labels), "annotations": {PIPELINE_ANNOTATION: scope.pipeline}},
        "spec": spec,
    }
