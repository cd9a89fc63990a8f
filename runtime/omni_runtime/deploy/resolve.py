"""From what a user wrote to the one plan of what runs. The operator, the webhooks and `omni run` call this function.

Order of precedence: pipeline spec, runtime profile, topology, defaults. Pure: no clock, no files, no cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic.alias_generators import to_camel

from omni_crds.v1alpha1.pipeline import EntrySpec, OmniPipeline, PipelineSpec, StageSpec
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_runtime.deploy.edges import check_arena, resolve_edge
from omni_runtime.deploy.model import Target, resolve_model
from omni_runtime.deploy.overlay import PIPELINE, Origins, Violations, profile_origin
from omni_runtime.deploy.plan import CONTRACT_VERSION, EntryPlan, ResolvedPlan, StagePlan, revision_of
from omni_runtime.deploy.pods import Groups, check_budget, check_groups, pod_groups, resolve_replicas
from omni_runtime.deploy.quantity import parse_quantity
from omni_runtime.deploy.stages import check_profile, merge_tolerations, resolve_stage
from omni_runtime.deploy.structure import Structure, resolve_structure
from omni_runtime.errors import FieldError
from omni_runtime.topology.registry import find_topology, one_of

Profiles = Mapping[str, OmniRuntimeProfile]

DEFAULT_PROFILE = "default"
DRAIN_SECONDS = 300  # an answer that is being spoken ends by itself within this time (T44)
ENTRY_PORT = 80  # of the Service
MAX_QUEUE = 256
_ENTRY_DEFAULTS = {f.name: f.default for f in msgspec.structs.fields(EntryPlan)}


def resolve(
    pipeline: OmniPipeline, profiles: Profiles, *, target: Target, default_profile: str | None = None
) -> ResolvedPlan:
    """The plan of a pipeline.

    profiles: every OmniRuntimeProfile of the cluster, by name. default_profile: for stages where neither the stage nor
    the pipeline names one; without it, the profile named `default` if there is one.
    Raises InvalidPipeline with every violation, and nothing else.
    """
    bad, origins = Violations(), Origins()
    spec = pipeline.spec
    if default_profile is None and DEFAULT_PROFILE in profiles:
        default_profile = DEFAULT_PROFILE
    topology = find_topology(spec.topology)
    structure = None
    if isinstance(topology, FieldError):
        bad.found.append(topology)
    else:
        structure = resolve_structure(spec, topology, bad)
    usable = _usable_profiles(spec, structure, profiles, default_profile, bad)
    model = resolve_model(spec.model, pipeline.metadata.name, list(usable.values()), target, origins, bad)
    if structure is None or isinstance(topology, FieldError):
        raise bad.error()
    groups = pod_groups(structure.stages)
    replicas = resolve_replicas(groups, origins, bad)
    stages = _stages(spec, structure, groups, profiles, usable, topology.name, default_profile, origins, bad)
    if len(stages) < len(structure.stages):
        raise bad.error()  # a stage without a profile or a device class: nothing to compare the others with
    edges = tuple(resolve_edge(e, stages, usable, topology.name, target, origins, bad) for e in structure.edges)
    paths = {node.name: node.path for node in structure.stages}
    for edge in edges:
        for end in (edge.source, edge.to):
            check_arena(edge, stages[end], paths[end], stages[edge.source], bad)
    check_groups(groups, stages, bad)
    check_budget(spec, groups, stages, replicas, bad)
    entry_profile = spec.runtime_profile or stages[structure.stages[0].name].profile
    # Missing (and complained about) when each stage names another one.
    entry = _entry(spec, usable[entry_profile], origins, bad) if entry_profile in usable else None
    asked_drain = spec.drain.timeout_seconds if spec.drain else None
    drain = origins.pick("drain.timeoutSeconds", [(PIPELINE, asked_drain)], DRAIN_SECONDS)
    if bad.found or entry is None:
        raise bad.error()
    sleepers = sorted(node.name for node in structure.stages if replicas[stages[node.name].pod_group].sleeps)
    plan = ResolvedPlan(
        pipeline=pipeline.metadata.name,
        topology=topology.name,
        revision="",
        contract_version=CONTRACT_VERSION,
        model=model,
        stages=tuple(stages[node.name] for node in structure.stages),
        edges=edges,
        entry=msgspec.structs.replace(entry, sleepers=tuple(sleepers)),
        drain_timeout_seconds=drain,
        replicas=replicas,
        origins=dict(sorted(origins.noted.items())),
        device_memory={
            s.name: s.accelerator.memory for s in spec.stages or () if s.accelerator and s.accelerator.memory
        },
    )
    return msgspec.structs.replace(plan, revision=revision_of(plan))


def _profile_name(spec: PipelineSpec, stage: StageSpec | None, default_profile: str | None) -> str | None:
    own = stage.runtime_profile if stage else None
    return own or spec.runtime_profile or default_profile


def _usable_profiles(
    spec: PipelineSpec, structure: Structure | None, profiles: Profiles, default_profile: str | None, bad: Violations
) -> dict[str, OmniRuntimeProfile]:
    """The profiles that the stages use and that exist, with a complaint for each that does not."""
    named = {f"spec.stages[{i}].runtimeProfile": s.runtime_profile for i, s in enumerate(spec.stages or ())}
    named["spec.runtimeProfile"] = spec.runtime_profile
    if structure and any(_profile_name(spec, node.spec, None) is None for node in structure.stages):
        named["spec.runtimeProfile"] = default_profile
    usable: dict[str, OmniRuntimeProfile] = {}
    for path, name in named.items():
        if name is None or name in usable:
            continue
        if name not in profiles:
            bad.add(path, name, "no OmniRuntimeProfile has this name", f"use {one_of(name, profiles)}")
        else:
            usable[name] = profiles[name]
            check_profile(profiles[name], path, bad)
    return usable


def _stages(
    spec: PipelineSpec,
    structure: Structure,
    groups: Groups,
    profiles: Profiles,
    usable: Profiles,
    topology: str,
    default_profile: str | None,
    origins: Origins,
    bad: Violations,
) -> dict[str, StagePlan]:
    """Stage name -> plan, without those that were complained about."""
    leader_of = {member.name: leader for leader, members in groups.items() for member in members}
    plans: dict[str, StagePlan] = {}
    for node in structure.stages:
        name = _profile_name(spec, node.spec, default_profile)
        if name is None:
            fix = f"name {one_of('', profiles)}" if profiles else "create an OmniRuntimeProfile, and name it"
            bad.add("spec.runtimeProfile", "", "a stage has no runtime profile, and there is no default", fix)
            continue
        if name not in usable:
            continue
        named = _profile_name(spec, node.spec, None) is not None
        origins.note(f"stages.{node.name}.profile", PIPELINE if named else "default")
        plan = resolve_stage(
            node,
            usable[name],
            topology,
            pod_group=leader_of[node.name],
            required_for=structure.required_for[node.name],
            gives=frozenset(e.template.payload for e in structure.edges if e.template.source == node.name),
            origins=origins,
            bad=bad,
        )
        if plan is not None:
            plans[node.name] = plan
    return plans


def _entry(spec: PipelineSpec, profile: OmniRuntimeProfile, origins: Origins, bad: Violations) -> EntryPlan:
    """The orchestrator and API server: needs no device, so it goes wherever the profile's general rules allow."""
    entry = spec.entry
    resources = entry.resources if entry else None
    cpu = origins.pick("entry.cpu", [(PIPELINE, resources.cpu if resources else None)], "200m")
    memory = origins.pick("entry.memory", [(PIPELINE, resources.memory if resources else None)], "1Gi")
    for field, text in (("cpu", cpu), ("memory", memory)):
        if parse_quantity(text) <= 0:
            bad.add(f"spec.entry.resources.{field}", text, "the entry needs some", "use more than 0")
    if resources and resources.shared_memory is not None:
        bad.add("spec.entry.resources.sharedMemory", resources.shared_memory, "no tensor passes the entry", "remove it")
    origins.note("entry.image", profile_origin(profile.metadata.name))
    general = profile.spec.scheduling
    return EntryPlan(
        image=profile.spec.images.entry or profile.spec.images.runtime,
        image_pull_policy=profile.spec.images.pull_policy.value,
        image_pull_secrets=tuple(profile.spec.images.pull_secrets or ()),
        cpu=cpu,
        memory=memory,
        port=origins.pick("entry.port", [(PIPELINE, entry.port if entry else None)], ENTRY_PORT),
        max_queue=origins.pick("entry.maxQueue", [(PIPELINE, entry.max_queue if entry else None)], MAX_QUEUE),
        node_selector=tuple(sorted(((general.node_selector if general else None) or {}).items())),
        tolerations=merge_tolerations(general),
        **_entry_options(entry or EntrySpec(), origins),
    )


def _sorted_or_none(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """A set of the spec: its order must not make another revision."""
    return None if names is None else tuple(sorted(set(names)))


def _entry_options(entry: EntrySpec, origins: Origins) -> dict[str, Any]:
    """What the entry does with requests; fields of EntryPlan that have defaults of their own."""
    asked = {
        "max_per_tenant": entry.max_per_tenant,
        "tenant_header": entry.tenant_header,
        "request_timeout_seconds": entry.request_timeout_seconds,
        "routing": entry.routing.value if entry.routing else None,
        "replays": entry.replays,
        "admin": entry.admin.value if entry.admin else None,
        "otlp_endpoint": entry.otlp_endpoint,
        "allowed_media_domains": _sorted_or_none(entry.allowed_media_domains),
    }
    return {
        name: origins.pick(f"entry.{to_camel(name)}", [(PIPELINE, value)], _ENTRY_DEFAULTS[name])
        for name, value in asked.items()
    }
