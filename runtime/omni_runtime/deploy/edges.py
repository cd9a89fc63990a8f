"""Edges of the plan: mode, connector, chunk sizes, and whether a chunk fits into the arenas at both ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from omni_crds.v1alpha1.pipeline import ChunkSizing, ChunkSpec, ConnectorType, EdgeMode
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_runtime.deploy.model import Target
from omni_runtime.deploy.overlay import PIPELINE, Origins, Violations, topology_origin
from omni_runtime.deploy.plan import FULL_PAYLOAD_MESSAGE_FRAMES, EdgePlan, StagePlan
from omni_runtime.deploy.quantity import format_bytes, parse_quantity
from omni_runtime.deploy.structure import EdgeNode
from omni_runtime.topology.types import KV_CHUNK_BYTES, ChunkDefaults, PayloadContract

DEFAULT_CHUNKS = {
    PayloadContract.CODEC_FRAMES: ChunkDefaults(initial_frames=4, frames=25, left_context_frames=28),
    PayloadContract.ACOUSTIC_FRAMES: ChunkDefaults(initial_frames=24, frames=96, left_context_frames=0),
}
"""Contracts whose rows are counted in frames. A chunk of the others is what the producer has: a phrase, a token's row,
some layers of a cache."""

# Upper estimates of one row, for sizing only: hidden rows of the 30B thinker are two bfloat16 vectors of 2048 and ids.
ROW_BYTES = {
    PayloadContract.THINKER_HIDDEN: 2 * 2 * 2048 + 64,
    PayloadContract.CODEC_FRAMES: 4 * 32,
    PayloadContract.TEXT_SEGMENTS: 1,
    PayloadContract.ACOUSTIC_FRAMES: 12_288,  # five spectra of 601 float32 values, and f0
}
_PHRASE_ROWS = 64 << 10  # bytes of text in one message
_DEFAULT_POSITIONS = 32_768
_EVERYWHERE = (ConnectorType.SHARED_MEMORY, ConnectorType.TCP)  # what a profile has that lists no connectors


def resolve_edge(
    node: EdgeNode,
    stages: Mapping[str, StagePlan],
    profiles: Mapping[str, OmniRuntimeProfile],
    topology: str,
    target: Target,
    origins: Origins,
    bad: Violations,
) -> EdgePlan:
    """One edge. stages: the resolved ends; profiles: by name."""
    template, spec = node.template, node.spec
    source, to = stages[template.source], stages[template.to]
    key = f"edges.{source.name}->{to.name}"
    asked_mode = spec.mode if spec else None
    mode = origins.pick(
        f"{key}.mode",
        [(PIPELINE, asked_mode)],
        EdgeMode.ASYNC_CHUNK if template.supports_async_chunk else EdgeMode.FULL_PAYLOAD,
    )
    if mode is EdgeMode.ASYNC_CHUNK and not template.supports_async_chunk:
        problem = f"stage {to.name} needs the whole {template.payload} before it starts"
        bad.add(f"{node.path}.mode", mode.value, problem, f"use {EdgeMode.FULL_PAYLOAD.value}, or remove the field")
    chunks = _chunks(node, mode, topology, key, origins, bad)
    return EdgePlan(
        source=source.name,
        to=to.name,
        payload=template.payload,
        mode=mode.value,
        connector=_connector(node, source, to, profiles, target, key, origins, bad),
        initial_frames=chunks.initial_frames,
        frames=chunks.frames,
        left_context_frames=chunks.left_context_frames,
        sizing=_sizing(node, key, origins).value,
        near=_near(node, source, to, profiles, target),
    )


def check_arena(edge: EdgePlan, stage: StagePlan, stage_path: str, source: StagePlan, bad: Violations) -> None:
    """The largest chunk of an edge fits into the arena of the stage at one of its ends; else it would wait for ever."""
    need = largest_chunk_bytes(edge, source)
    if parse_quantity(stage.shared_memory) < need:
        bad.add(
            f"{stage_path}.resources.sharedMemory",
            stage.shared_memory,
            f"one chunk of edge {edge.source} -> {edge.to} takes up to {format_bytes(need)}",
            f"use at least {format_bytes(2 * need)}, so that one chunk travels while the next is written",
        )


def largest_chunk_bytes(edge: EdgePlan, source: StagePlan) -> int:
    """Upper estimate of one message. The first of a hidden-row edge carries every position of the prompt."""
    if edge.payload is PayloadContract.KV_CACHE:
        return KV_CHUNK_BYTES
    if edge.payload is PayloadContract.THINKER_HIDDEN:
        args = dict(source.engine_args)
        rows = int(args.get("max_model_len", _DEFAULT_POSITIONS))
    elif edge.payload is PayloadContract.TEXT_SEGMENTS:
        rows = _PHRASE_ROWS
    elif edge.mode == EdgeMode.FULL_PAYLOAD:
        rows = FULL_PAYLOAD_MESSAGE_FRAMES
    else:
        rows = max(edge.initial_frames, edge.frames) + edge.left_context_frames
    return rows * ROW_BYTES[edge.payload]


def _chunks(
    node: EdgeNode, mode: EdgeMode, topology: str, key: str, origins: Origins, bad: Violations
) -> ChunkDefaults:
    asked = (node.spec.chunk if node.spec else None) or ChunkSpec()
    path, payload = f"{node.path}.chunk", node.template.payload
    defaults = node.template.chunk or DEFAULT_CHUNKS.get(payload)
    stated = asked.model_dump(exclude_none=True, by_alias=True)
    if defaults is None or mode is EdgeMode.FULL_PAYLOAD:
        if stated:
            why = (
                f"mode {mode.value} sends one message"
                if mode is EdgeMode.FULL_PAYLOAD
                else f"{payload} is not counted in frames; the producer decides what a chunk is"
            )
            bad.add(path, ", ".join(f"{k}: {v}" for k, v in stated.items()), why, "remove the chunk sizes")
        return ChunkDefaults(0, 0, defaults.left_context_frames if defaults else 0)
    below = topology_origin(topology)
    frames = origins.pick(f"{key}.frames", [(PIPELINE, asked.frames), (below, defaults.frames)], defaults.frames)
    # A user who only lowers `frames` means that the first chunk is no larger.
    first = min(defaults.initial_frames, frames)
    initial = origins.pick(f"{key}.initialFrames", [(PIPELINE, asked.initial_frames), (below, first)], first)
    left = origins.pick(
        f"{key}.leftContextFrames",
        [(PIPELINE, asked.left_context_frames), (below, defaults.left_context_frames)],
        defaults.left_context_frames,
    )
    if initial > frames:
        problem = f"the first chunk is larger than the following ones ({frames}), which only delays the first sound"
        bad.add(f"{path}.initialFrames", initial, problem, f"use {min(defaults.initial_frames, frames)} to {frames}")
    if left and payload is not PayloadContract.CODEC_FRAMES:
        problem = f"the decoder of {payload} keeps its own state and needs no left context"
        bad.add(f"{path}.leftContextFrames", left, problem, "remove it, or use 0")
    return ChunkDefaults(initial_frames=initial, frames=frames, left_context_frames=left)


def _sizing(node: EdgeNode, key: str, origins: Origins) -> ChunkSizing:
    asked = node.spec.chunk.sizing if node.spec and node.spec.chunk else None
    if asked is None:  # the rule, not a value worth an origin
        return ChunkSizing.FIXED
    return origins.pick(f"{key}.sizing", [(PIPELINE, asked)], ChunkSizing.FIXED)


def _explicit(node: EdgeNode) -> ConnectorType | None:
    """The connector that the user names; None where the choice is ours."""
    asked = node.spec.connector.type if node.spec and node.spec.connector else None
    return None if asked is ConnectorType.AUTO else asked


def _together(source: StagePlan, to: StagePlan, target: Target) -> bool:
    return target == "local" or source.pod_group == to.pod_group


def _offered(stage: StagePlan, profiles: Mapping[str, OmniRuntimeProfile]) -> tuple[ConnectorType, ...]:
    return profiles[stage.profile].spec.connectors or _EVERYWHERE


def _near(
    node: EdgeNode, source: StagePlan, to: StagePlan, profiles: Mapping[str, OmniRuntimeProfile], target: Target
) -> bool:
    """Whether two pods of the edge that happen to be on one node may share memory through a folder of it."""
    if _explicit(node) is not None or _together(source, to, target):
        return False
    if source.node_local_host_path is None or source.node_local_host_path != to.node_local_host_path:
        return False
    return all(ConnectorType.SHARED_MEMORY in _offered(stage, profiles) for stage in (source, to))


def _connector(
    node: EdgeNode,
    source: StagePlan,
    to: StagePlan,
    profiles: Mapping[str, OmniRuntimeProfile],
    target: Target,
    key: str,
    origins: Origins,
    bad: Violations,
) -> str:
    """SharedMemory where both ends see one arena; else Mooncake where the profiles of both have it, else TCP.

    A platform team lists Mooncake where RDMA works. `omni run` starts all stages on one machine.
    """
    explicit, together = _explicit(node), _together(source, to, target)
    offers = [_offered(stage, profiles) for stage in (source, to)]
    fitting = ConnectorType.SHARED_MEMORY if together else ConnectorType.TCP
    one_protocol = together or (source.rdma is None) == (to.rdma is None)
    if not together and one_protocol and all(ConnectorType.MOONCAKE in offered for offered in offers):
        fitting = ConnectorType.MOONCAKE
    chosen = origins.pick(f"{key}.connector", [(PIPELINE, explicit)], fitting)
    path = f"{node.path}.connector.type"
    if chosen is ConnectorType.SHARED_MEMORY and not together:
        # The consumer would look for an arena that is on another machine, and wait for ever (R62).
        problem = f"{source.name} and {to.name} run in different pods"
        bad.add(path, chosen.value, problem, "use Auto or TCP, or give both stages the same podGroup")
    else:
        for stage, offered in zip((source, to), offers, strict=True):
            if chosen not in offered:
                names = ", ".join(c.value for c in offered)
                problem = f"runtime profile {stage.profile!r} of stage {stage.name} offers only {names}"
                works = [c.value for c in offered if together or c is not ConnectorType.SHARED_MEMORY]
                bad.add(path, chosen.value, problem, f"use {', '.join(works) or 'Auto'}, or another runtime profile")
        if chosen is ConnectorType.MOONCAKE and not one_protocol:
            by_rdma, by_tcp = (source, to) if source.rdma else (to, source)
            problem = (
                f"Mooncake of runtime profile {by_rdma.profile!r} (stage {by_rdma.name}) sends by RDMA, "
                f"that of {by_tcp.profile!r} ({by_tcp.name}) by TCP"
            )
            bad.add(path, chosen.value, problem, "use TCP, or give both profiles the same mooncake.protocol")
    return chosen.value
