"""One stage of the plan: topology, runtime profile and the user's overlay laid over each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from omni_crds.v1alpha1.pipeline import SchedulingSpec, Toleration
from omni_crds.v1alpha1.runtimeprofile import (
    EngineBackend,
    MooncakeProtocol,
    MooncakeSpec,
    OmniRuntimeProfile,
    ProbesSpec,
)
from omni_runtime.deploy.devices import resolve_devices
from omni_runtime.deploy.overlay import PIPELINE, Origins, Violations, profile_origin, topology_origin
from omni_runtime.deploy.plan import RdmaPlan, StagePlan
from omni_runtime.deploy.quantity import format_bytes, parse_quantity
from omni_runtime.deploy.structure import StageNode
from omni_runtime.topology.engines import ENGINES, BadArg, canonical_arg
from omni_runtime.topology.registry import one_of
from omni_runtime.topology.types import Modality, PayloadContract


def resolve_stage(
    node: StageNode,
    profile: OmniRuntimeProfile,
    topology: str,
    *,
    pod_group: str,
    required_for: tuple[Modality, ...],
    gives: frozenset[PayloadContract],
    origins: Origins,
    bad: Violations,
) -> StagePlan | None:
    """The stage as its pods will run it; None after a complaint that leaves no device to plan for.

    gives: the payloads of the edges that leave the stage.
    """
    key, spec, template = f"stages.{node.name}", node.spec, node.template
    from_topology, from_profile = topology_origin(topology), profile_origin(profile.metadata.name)
    origins.note(f"{key}.engine", PIPELINE if spec and spec.engine else from_topology)
    devices = resolve_devices(node, profile, topology, origins, bad)
    resources = spec.resources if spec else None
    cpu = origins.pick(
        f"{key}.cpu", [(PIPELINE, resources.cpu if resources else None), (from_topology, template.cpu)], "1"
    )
    memory = origins.pick(
        f"{key}.memory", [(PIPELINE, resources.memory if resources else None), (from_topology, template.memory)], "2Gi"
    )
    shared = origins.pick(
        f"{key}.sharedMemory",
        [(PIPELINE, resources.shared_memory if resources else None), (from_topology, template.shared_memory)],
        "256Mi",
    )
    _check_resources(node, cpu, memory, shared, bad)
    concurrency = origins.pick(
        f"{key}.maxConcurrency",
        [(PIPELINE, spec.max_concurrency if spec else None), (from_topology, template.max_concurrency)],
        8,
    )
    engine_args = _engine_args(node, from_topology, gives, origins, bad)
    general = profile.spec.scheduling
    own = spec.scheduling if spec else None
    priority = origins.pick(
        f"{key}.priorityClassName",
        [
            (PIPELINE, own.priority_class_name if own else None),
            (from_profile, general.priority_class_name if general else None),
        ],
        "",
    )
    if devices is None:
        return None
    if PayloadContract.THINKER_HIDDEN in gives and devices.pipeline > 1:
        problem = "the next stage needs hidden states, and they are read where the first layers are"
        bad.add(f"{node.path}.parallelism.pipeline", devices.pipeline, problem, "use 1, and tensor for more devices")
    if devices.plan.resource_name is None and dict(engine_args).get("enable_sleep_mode") == "true":
        problem = "a stage on the CPU has no device memory to give back"
        bad.add(
            f"{node.path}.engineArgs[name=enable_sleep_mode]", "true", problem, "remove it, or scale the stage down"
        )
    images, cache, probes = profile.spec.images, profile.spec.model_cache, profile.spec.probes
    for field in ("image", "connectorImage", "env", "probes", "modelCache", "nodeLocalVolume", "mooncake"):
        origins.note(f"{key}.{field}", from_profile)
    probes, node_local = probes or ProbesSpec(), profile.spec.node_local_volume
    return StagePlan(
        name=node.name,
        engine=template.engine,
        emits=template.emits,
        required_for=required_for,
        pod_group=pod_group,
        profile=profile.metadata.name,
        image=images.runtime,
        connector_image=images.connector or images.runtime,
        image_pull_policy=images.pull_policy.value,
        image_pull_secrets=tuple(images.pull_secrets or ()),
        device=devices.plan,
        tensor_parallel=devices.tensor,
        pipeline_parallel=devices.pipeline,
        max_concurrency=concurrency,
        cpu=cpu,
        memory=memory,
        shared_memory=shared,
        engine_args=engine_args,
        env=tuple(sorted((e.name, e.value) for e in profile.spec.env or ())),
        node_selector=devices.node_selector,
        tolerations=merge_tolerations(general, own),
        priority_class_name=priority or None,
        model_cache_claim=cache.persistent_volume_claim if cache else None,
        model_cache_host_path=cache.host_path if cache else None,
        startup_timeout_seconds=probes.startup_timeout_seconds,
        probe_period_seconds=probes.period_seconds,
        node_local_host_path=node_local.host_path if node_local else None,
        rdma=_rdma(profile.spec.mooncake),
    )


def check_profile(profile: OmniRuntimeProfile, path: str, bad: Violations) -> None:
    """What this runtime cannot do with a profile, whatever the stage."""
    if profile.spec.backend is EngineBackend.VLLM_OMNI:
        problem = "its backend vllm-omni is not run by this version"
        bad.add(path, profile.metadata.name, problem, "use a profile with backend native")


def merge_tolerations(*layers: SchedulingSpec | None) -> tuple[dict[str, str], ...]:
    """All tolerations of the layers, each once, in an order that does not depend on how they were written."""
    every: Iterable[Toleration] = (t for layer in layers if layer for t in layer.tolerations or ())
    plain = {tuple(sorted(t.model_dump(mode="json", exclude_none=True, by_alias=True).items())) for t in every}
    return tuple(dict(items) for items in sorted(plain))


def _rdma(mooncake: MooncakeSpec | None) -> RdmaPlan | None:
    if mooncake is None or mooncake.protocol is not MooncakeProtocol.RDMA:
        return None
    resource = mooncake.resource
    return RdmaPlan(
        devices=tuple(sorted(set(mooncake.devices or ()))),
        resource_name=resource.name if resource else None,
        resource_count=resource.count if resource else 0,
    )


def _check_resources(node: StageNode, cpu: str, memory: str, shared: str, bad: Violations) -> None:
    for field, text in (("cpu", cpu), ("memory", memory)):
        if parse_quantity(text) <= 0:
            bad.add(f"{node.path}.resources.{field}", text, "an engine needs some", "use more than 0")
    if parse_quantity(shared) >= parse_quantity(memory) > 0:
        # Pages of a memory volume count against the container that touched them.
        bad.add(
            f"{node.path}.resources.sharedMemory",
            shared,
            f"the arena counts against the stage's memory of {memory}",
            f"raise resources.memory above {format_bytes(int(parse_quantity(shared)))}",
        )


def _engine_args(
    node: StageNode, from_topology: str, gives: frozenset[PayloadContract], origins: Origins, bad: Violations
) -> tuple[tuple[str, str], ...]:
    engine, key = ENGINES[node.template.engine], f"stages.{node.name}.engineArgs"
    merged = dict(node.template.engine_args)
    for name in merged:
        origins.note(f"{key}.{name}", from_topology)
    refused = dict(engine.refused)
    own: dict[str, int] = {}
    for i, arg in enumerate((node.spec.engine_args if node.spec else None) or ()):
        path = f"{node.path}.engineArgs[{i}]"
        known = engine.arg(arg.name)
        if arg.name in own:
            bad.add(f"{path}.name", arg.name, f"engineArgs[{own[arg.name]}] has the same name", "keep one of them")
            continue
        own[arg.name] = i
        if arg.name in refused:
            bad.add(f"{path}.name", arg.name, "not an engine arg here", refused[arg.name])
        elif known is None:
            problem = f"engine {engine.kind} has no such arg"
            bad.add(f"{path}.name", arg.name, problem, f"use {one_of(arg.name, [a.name for a in engine.args])}")
        else:
            try:
                merged[arg.name] = canonical_arg(known, arg.value)
                origins.note(f"{key}.{arg.name}", PIPELINE)
            except BadArg as error:
                bad.add(f"{path}.value", arg.value, f"{arg.name} is of type {known.type}", str(error))
    if PayloadContract.THINKER_HIDDEN in gives:
        _check_tap(node, merged, own, key, origins, bad)
    return tuple(sorted(merged.items()))


def _check_tap(
    node: StageNode, merged: dict[str, str], own: dict[str, int], key: str, origins: Origins, bad: Violations
) -> None:
    """A stage that gives hidden rows computes every row; and in eager mode, if hooks take them."""
    no_cache = "a prefix-cache hit computes no hidden rows, and the next stage would miss them"
    rules = [("enable_prefix_caching", "false", no_cache, "remove it")]
    if merged.get("tap") == "hooks":
        no_hooks = "captured graphs skip the hook that takes the hidden rows"
        rules.append(("enforce_eager", "true", no_hooks, "remove it, or set tap to aux"))
    for name, needed, why, fix in rules:
        if merged.get(name, needed) != needed:
            path = f"{node.path}.engineArgs[{own[name]}].value"
            bad.add(path, merged[name], why, f"set {name} to {needed}, or {fix}")
        if name not in merged:
            merged[name] = needed
            origins.note(f"{key}.{name}", "default")
