"""NetworkPolicies: the control channel takes the pipeline's own pods, a data port only the consumers of its edges."""

from __future__ import annotations

from collections.abc import Iterable

from omni_operator.kinds import NETWORK_POLICY, JsonObject
from omni_operator.names import (
    ENTRY_STAGE,
    PIPELINE_LABEL,
    STAGE_LABEL,
    entry_name,
    pipeline_label,
    stage_name,
    stage_selector,
)
from omni_operator.resources.child import Child, Scope, build_child
from omni_operator.resources.stage_pod import engine_port
from omni_runtime.deploy.plan import (
    ENGINE_HTTP_PORT,
    ENTRY_CONTROL_PORT,
    ENTRY_HTTP_PORT,
    MOONCAKE_PORTS,
    SIDECAR_DATA_PORT,
)

MAX_ENGINES_PER_POD = 16  # spec.stages has at most so many


def build_entry_policy(scope: Scope) -> Child:
    own_pods = {"podSelector": {"matchLabels": {PIPELINE_LABEL: pipeline_label(scope.pipeline)}}}
    return _policy(
        scope,
        entry_name(scope.pipeline),
        ENTRY_STAGE,
        [
            {"ports": [_tcp(ENTRY_HTTP_PORT)]},  # the API and /metrics; an Ingress or mesh decides who reaches it
            {"from": [own_pods], "ports": [_tcp(ENTRY_CONTROL_PORT)]},
        ],
        None,
    )


def build_stage_policy(scope: Scope, leader: str, consumers: Iterable[str], fetchers: Iterable[str] = ()) -> Child:
    """consumers: leaders of the pod groups that read edges of this one, in any revision that still runs.

    fetchers: those among them whose edge is Mooncake; its transfer engine takes ports of its own.
    """
    rules: list[JsonObject] = [
        # Probes and /metrics of the engines and, among their ports, of the sidecar.
        {"ports": [{**_tcp(ENGINE_HTTP_PORT), "endPort": engine_port(MAX_ENGINES_PER_POD - 1)}]}
    ]
    first, last = MOONCAKE_PORTS
    data, fetched = [_tcp(SIDECAR_DATA_PORT)], [{**_tcp(first), "endPort": last}]
    for peers, ports in ((sorted(set(consumers)), data), (sorted(set(fetchers)), fetched)):
        if not peers:
            continue
        rules.append(
            {
                "from": [
                    {
                        "podSelector": {
                            "matchLabels": {PIPELINE_LABEL: pipeline_label(scope.pipeline)},
                            "matchExpressions": [{"key": STAGE_LABEL, "operator": "In", "values": peers}],
                        }
                    }
                ],
                "ports": ports,
            }
        )
    name = stage_name(scope.pipeline, leader)
    return _policy(scope, name, leader, rules, name)


def _policy(scope: Scope, name: str, stage: str, ingress: list[JsonObject], owner: str | None) -> Child:
    return build_child(
        NETWORK_POLICY,
        scope,
        name,
        {
            "spec": {
                "podSelector": {"matchLabels": stage_selector(scope.pipeline, stage)},
                "policyTypes": ["Ingress"],
                "ingress": ingress,
            }
        },
        labels={STAGE_LABEL: stage},
        owner_stage=owner,
    )


def _tcp(port: int) -> JsonObject:
    return {"port": port, "protocol": "TCP"}
