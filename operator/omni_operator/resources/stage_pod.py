"""The pod of a pod group: the connector as native sidecar, one engine container per stage.

Devices of a group. The stages of a group share its devices (their memory fractions sum to at most 1), but a device
plugin gives a device to one container only. So the first stage of a device class requests the devices, as many as the
hungriest of them uses, and the others request nothing: they see the node's devices through the vendor's visibility
variable, and OMNI_SHARED_DEVICE_OF names the stage whose devices they are to use. The alternative, all engines in one
container, would lose what separate containers give: a restart, a memory limit, a log and a probe per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from omni_operator.kinds import JsonObject
from omni_operator.names import (
    REVISION_LABEL,
    TOPOLOGY_LABEL,
    entry_control_name,
    stage_labels,
    stage_selector,
)
from omni_operator.resources.child import Scope
from omni_operator.resources.pod import (
    EXIT_SECONDS,
    PLAN_FILE,
    RUN_AS,
    container_security,
    environment,
    http_probe,
    locking_security,
    plan_and_keys_mounts,
    plan_and_keys_volumes,
    pod_template,
)
from omni_runtime.deploy.plan import (
    CURVE_MOUNT_PATH,
    ENGINE_HTTP_PORT,
    ENTRY_CONTROL_PORT,
    IPC_MOUNT_PATH,
    SHM_MOUNT_PATH,
    SIDECAR_DATA_PORT,
    SIDECAR_HTTP_PORT,
    RdmaPlan,
    ResolvedPlan,
    StagePlan,
)
from omni_runtime.deploy.quantity import parse_quantity

CACHE_MOUNT_PATH = "/var/cache/omni"
PACKAGED_MODELS_PATH = "/opt/omni/models"
CLAIM_MOUNT_ROOT = "/models"
NODE_MOUNT_PATH = "/run/omni-node"

MIB = 1024 * 1024
# Beside the arena, torch and vLLM keep small segments in /dev/shm; with the 64 MiB default vLLM's CPU build does not start.
SHM_SLACK_BYTES = 512 * MIB
SIDECAR_BASE_BYTES = 192 * MIB
SIDECAR_CPU = "50m"

# Lets a container see devices that it did not request.
VISIBILITY = {"nvidia.com/": "NVIDIA_VISIBLE_DEVICES", "huawei.com/": "ASCEND_VISIBLE_DEVICES"}


def arena_bytes(group: Sequence[StagePlan]) -> int:
    """Size of the connector arena of a pod: the sum of what its stages ask for."""
    return int(sum((parse_quantity(s.shared_memory) for s in group), Decimal(0)))


def engine_port(index: int) -> int:
    """HTTP port of the engine at this place in its pod; steps over the sidecar's."""
    port = ENGINE_HTTP_PORT + index
    return port if port < SIDECAR_HTTP_PORT else port + 1


def container_name(group: Sequence[StagePlan], stage: StagePlan) -> str:
    return "engine" if stage.name == group[0].name else f"engine-{stage.name}"


def build_stage_pod(scope: Scope, plan: ResolvedPlan, group: Sequence[StagePlan]) -> JsonObject:
    """Pod template of one pod group (leader first)."""
    leader = group[0]
    return pod_template(
        scope,
        labels={
            **stage_labels(scope.pipeline, leader.name),
            REVISION_LABEL: plan.revision,
            TOPOLOGY_LABEL: plan.topology,
        },
        grace_seconds=plan.drain_timeout_seconds + EXIT_SECONDS,
        init_containers=[_sidecar(plan, group)],
        containers=[_engine(scope, plan, group, index) for index in range(len(group))],
        volumes=_volumes(scope, plan, group),
        node_selector={k: v for stage in reversed(group) for k, v in stage.node_selector},
        tolerations=_unique([t for stage in group for t in stage.tolerations]),
        pull_secrets=tuple(dict.fromkeys(s for stage in group for s in stage.image_pull_secrets)),
        priority_class=leader.priority_class_name,
        spread_over=stage_selector(scope.pipeline, leader.name),
    )


def _sidecar(plan: ResolvedPlan, group: Sequence[StagePlan]) -> JsonObject:
    """Starts before the engines and stops after them, so a drain can still send its last chunks."""
    leader, arena, rdma = group[0], arena_bytes(group), rdma_of(plan, group)
    memory = str(SIDECAR_BASE_BYTES + arena)
    devices = {rdma.resource_name: str(rdma.resource_count)} if rdma and rdma.resource_name else {}
    return {
        "name": "connector",
        "image": leader.connector_image,
        "imagePullPolicy": leader.image_pull_policy,
        "restartPolicy": "Always",
        "command": ["python", "-m", "omni_runtime.connectors.sidecar"],
        "args": [
            *("--plan", PLAN_FILE),
            *("--curve", CURVE_MOUNT_PATH),
            *("--ipc-dir", IPC_MOUNT_PATH),
            *("--arena-bytes", str(arena)),
            *("--shm-dir", SHM_MOUNT_PATH),
            *("--data-port", str(SIDECAR_DATA_PORT)),
            *("--http-port", str(SIDECAR_HTTP_PORT)),
            *("--advertise-host", "$(POD_IP)"),
            *("--domain", "$(POD_UID)"),
            *_node_args(plan, group),
            *(("--run-as", str(RUN_AS)) if rdma else ()),
        ],
        "env": environment({"HOME": "/tmp", **(_rdma_env(rdma) if rdma else {})}),  # noqa: S108
        "ports": [
            {"name": "data", "containerPort": SIDECAR_DATA_PORT},
            {"name": "connector-http", "containerPort": SIDECAR_HTTP_PORT},
        ],
        "startupProbe": http_probe("/ready", SIDECAR_HTTP_PORT, period=1, failures=60),
        "livenessProbe": http_probe("/livez", SIDECAR_HTTP_PORT, period=10, failures=6, timeout=10),
        # Pages of the arena count for whoever touches them first: sidecar or engine, so both limits cover it.
        "resources": {
            "requests": {"cpu": SIDECAR_CPU, "memory": memory, **devices},
            "limits": {"memory": memory, **devices},
        },
        "securityContext": locking_security() if rdma else container_security(),
        "volumeMounts": [
            *plan_and_keys_mounts(),
            {"name": "ipc", "mountPath": IPC_MOUNT_PATH},
            {"name": "shm", "mountPath": SHM_MOUNT_PATH},
            *_node_mounts(plan, group),
        ],
    }


def rdma_of(plan: ResolvedPlan, group: Sequence[StagePlan]) -> RdmaPlan | None:
    """What the pod's connector needs for RDMA; None: it has no Mooncake edge to another pod, or that goes over TCP."""
    members = {stage.name for stage in group}
    leaves = any(e.connector == "Mooncake" and len(members & {e.source, e.to}) == 1 for e in plan.edges)
    return group[0].rdma if leaves else None


def _rdma_env(rdma: RdmaPlan) -> dict[str, str]:
    devices = {"OMNI_MOONCAKE_DEVICE": ",".join(rdma.devices)} if rdma.devices else {}
    return {"OMNI_MOONCAKE_PROTOCOL": "rdma", **devices}


def _engine(scope: Scope, plan: ResolvedPlan, group: Sequence[StagePlan], index: int) -> JsonObject:
    stage = group[index]
    port = engine_port(index)
    period = stage.probe_period_seconds
    return {
        "name": container_name(group, stage),
        "image": stage.image,
        "imagePullPolicy": stage.image_pull_policy,
        "command": ["python", "-m", "omni_runtime.stages.worker"],
        "args": [
            *("--plan", PLAN_FILE),
            *("--curve", CURVE_MOUNT_PATH),
            *("--stage", stage.name),
            *("--replica", "$(POD_UID)"),
            *("--entry-host", f"{entry_control_name(scope.pipeline)}.{scope.namespace}.svc"),
            *("--entry-port", str(ENTRY_CONTROL_PORT)),
            *("--ipc-dir", IPC_MOUNT_PATH),
            *("--http-port", str(port)),
            *("--models-dir", PACKAGED_MODELS_PATH),
            *_node_args(plan, group),
        ],
        "env": environment(_engine_env(group, stage)),
        "ports": [{"name": f"http-{index}" if index else "http", "containerPort": port}],
        # The time to load weights is the startup probe's; afterwards liveness is quick. Readiness waits for the
        # admission by an orchestrator (T40), which must not kill the pod when the entry is late (T73).
        "startupProbe": http_probe(
            "/livez", port, period=period, failures=max(1, stage.startup_timeout_seconds // period)
        ),
        "livenessProbe": http_probe("/livez", port, period=10, failures=6, timeout=10),
        "readinessProbe": http_probe("/ready", port, period=period, failures=3),
        "resources": _engine_resources(group, stage),
        "securityContext": container_security(),
        "volumeMounts": [
            *plan_and_keys_mounts(),
            {"name": "ipc", "mountPath": IPC_MOUNT_PATH},
            {"name": "shm", "mountPath": SHM_MOUNT_PATH},
            {"name": "cache", "mountPath": CACHE_MOUNT_PATH},
            *_node_mounts(plan, group),
            *_model_mounts(plan),
        ],
    }


def shares_device_with(group: Sequence[StagePlan], stage: StagePlan) -> StagePlan | None:
    """The stage of the group that requests the devices which this stage uses too; None: it is that stage, or uses none."""
    if stage.device.resource_name is None:
        return None
    first = next(s for s in group if s.device.device_class == stage.device.device_class)
    return None if first.name == stage.name else first


def _engine_env(group: Sequence[StagePlan], stage: StagePlan) -> dict[str, str]:
    env = {
        "HOME": "/tmp",  # noqa: S108
        "HF_HOME": f"{CACHE_MOUNT_PATH}/huggingface",
        "XDG_CACHE_HOME": f"{CACHE_MOUNT_PATH}/xdg",
        "VLLM_CACHE_ROOT": f"{CACHE_MOUNT_PATH}/vllm",
    }
    shared = shares_device_with(group, stage)
    if shared is not None:
        env["OMNI_SHARED_DEVICE_OF"] = shared.name
        resource = stage.device.resource_name or ""
        env.update({variable: "all" for prefix, variable in VISIBILITY.items() if resource.startswith(prefix)})
    return env | dict(stage.env)


def _engine_resources(group: Sequence[StagePlan], stage: StagePlan) -> JsonObject:
    limit = parse_quantity(stage.memory) + arena_bytes(group)
    requests: JsonObject = {"cpu": stage.cpu, "memory": stage.memory}
    limits: JsonObject = {"memory": str(int(limit))}
    if stage.device.resource_name is not None and shares_device_with(group, stage) is None:
        sharing = [s.device.count for s in group if s.device.device_class == stage.device.device_class]
        requests[stage.device.resource_name] = limits[stage.device.resource_name] = str(max(sharing))
    return {"requests": requests, "limits": limits}


def _claim_of(plan: ResolvedPlan) -> str | None:
    scheme, _, rest = plan.model.uri.partition("://")
    return rest.split("/", 1)[0] if scheme == "pvc" else None


def _model_mounts(plan: ResolvedPlan) -> list[JsonObject]:
    claim = _claim_of(plan)
    return [{"name": "model", "mountPath": f"{CLAIM_MOUNT_ROOT}/{claim}", "readOnly": True}] if claim else []


def _volumes(scope: Scope, plan: ResolvedPlan, group: Sequence[StagePlan]) -> list[JsonObject]:
    shm = arena_bytes(group) + SHM_SLACK_BYTES
    claim = _claim_of(plan)
    return [
        *plan_and_keys_volumes(scope, plan),
        {"name": "ipc", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(shm)}},
        {"name": "cache", **_cache_source(group[0])},
        *_node_volumes(plan, group),
        *([{"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}] if claim else []),
    ]


def _cache_source(leader: StagePlan) -> JsonObject:
    if leader.model_cache_claim:
        return {"persistentVolumeClaim": {"claimName": leader.model_cache_claim}}
    if leader.model_cache_host_path:
        return {"hostPath": {"path": leader.model_cache_host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {}}


def _node_folder(plan: ResolvedPlan, group: Sequence[StagePlan]) -> str | None:
    """Folder of the node through which the pod reaches neighbours; None: it has no edge that may go that way."""
    members = {stage.name for stage in group}
    near = any(edge.near and members & {edge.source, edge.to} for edge in plan.edges)
    return group[0].node_local_host_path if near else None


def _node_args(plan: ResolvedPlan, group: Sequence[StagePlan]) -> list[str]:
    return ["--node-dir", NODE_MOUNT_PATH] if _node_folder(plan, group) else []


def _node_mounts(plan: ResolvedPlan, group: Sequence[StagePlan]) -> list[JsonObject]:
    return [{"name": "node", "mountPath": NODE_MOUNT_PATH}] if _node_folder(plan, group) else []


def _node_volumes(plan: ResolvedPlan, group: Sequence[StagePlan]) -> list[JsonObject]:
    """The folder has to exist: one that the kubelet made would belong to root, and no pod could write there."""
    path = _node_folder(plan, group)
    return [{"name": "node", "hostPath": {"path": path, "type": "Directory"}}] if path else []


def _unique(items: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found
