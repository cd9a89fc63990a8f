"""Services: the API, the entry's control channel, and one headless Service per stage."""

from __future__ import annotations

from omni_operator.kinds import SERVICE, JsonObject
from omni_operator.names import (
    ENTRY_STAGE,
    STAGE_LABEL,
    api_service_name,
    entry_control_name,
    stage_name,
    stage_selector,
)
from omni_operator.resources.child import Child, Scope, build_child
from omni_operator.resources.stage_pod import engine_port
from omni_runtime.deploy.plan import (
    ENTRY_CONTROL_PORT,
    SIDECAR_DATA_PORT,
    SIDECAR_HTTP_PORT,
)


def build_api_service(scope: Scope, port: int) -> Child:
    """What clients talk to. The selector spans revisions: readiness decides which one answers."""
    return build_child(
        SERVICE,
        scope,
        api_service_name(scope.pipeline),
        {
            "spec": {
                "type": "ClusterIP",
                "selector": stage_selector(scope.pipeline, ENTRY_STAGE),
                "ports": [_port("http", port, "http")],
            }
        },
        labels={STAGE_LABEL: ENTRY_STAGE},
    )


def build_entry_control_service(scope: Scope) -> Child:
    """Where stage replicas register. Publishes addresses that are not ready: the entry becomes ready only by their
    registration (T73)."""
    return build_child(
        SERVICE,
        scope,
        entry_control_name(scope.pipeline),
        {
            "spec": {
                "type": "ClusterIP",
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": stage_selector(scope.pipeline, ENTRY_STAGE),
                "ports": [_port("control", ENTRY_CONTROL_PORT, ENTRY_CONTROL_PORT)],
            }
        },
        labels={STAGE_LABEL: ENTRY_STAGE},
    )


def build_stage_service(scope: Scope, stage: str, leader: str, position: int) -> Child:
    """Headless Service of one stage; its selector holds immutable labels only (T1).

    stage: its own name; leader: that of its pod group, whose label the pods carry; position: of the stage in the group.
    """
    return build_child(
        SERVICE,
        scope,
        stage_name(scope.pipeline, stage),
        {
            "spec": {
                "type": "ClusterIP",
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": stage_selector(scope.pipeline, leader),
                "ports": [
                    _port("http", engine_port(position), engine_port(position)),
                    _port("data", SIDECAR_DATA_PORT, SIDECAR_DATA_PORT),
                    _port("connector-http", SIDECAR_HTTP_PORT, SIDECAR_HTTP_PORT),
                ],
            }
        },
        labels={STAGE_LABEL: stage},
        owner_stage=stage_name(scope.pipeline, stage),
    )


def _port(name: str, port: int, target: int | str) -> JsonObject:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}
