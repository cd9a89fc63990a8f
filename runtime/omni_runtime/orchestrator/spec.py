"""What a request needs of a pipeline, fixed at admission. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import InvalidRequest
from omni_runtime.orchestrator.values import RequestId, StageName, Value
from omni_runtime.topology.graph import reachable, successors
from omni_runtime.topology.types import Modality, PayloadContract


class RequestSpec(Value, frozen=True):
    """What a request needs; fixed at admission.

    stages: in topological order, only those that the modalities need (text-only never touches the talker).
    emits: the client modalities of a stage, restricted to the requested ones.
    final: the stages whose end completes the request (modality-set completion, not "the last stage").
    start: the stage that takes the client's input.
    text_edge: the text_segments edge that plain text of the client takes the place of; "" if the start stage has none.
    tenant: whose request it is; "" = nobody's in particular. label: the client's name for it, for logs and traces.
    trace_parent: the client's own span, as W3C traceparent.
    """

    request: RequestId
    modalities: frozenset[Modality]
    stages: tuple[StageName, ...]
    emits: Mapping[StageName, frozenset[Modality]]
    final: frozenset[StageName]
    start: StageName
    text_edge: str = ""
    tenant: str = ""
    label: str = ""
    trace_parent: str = ""


def build_request_spec(
    plan: ResolvedPlan,
    request: RequestId,
    modalities: frozenset[Modality],
    code_edges: bool = False,
    start: StageName | None = None,
    tenant: str = "",
) -> RequestSpec:
    """Stages, outputs and completion set of a request. With `code_edges` the sources of codec edges must end too, so
    that every code has arrived before the end. `start`: where the client's input goes in; None: the first stage.

    Raises KeyError for a modality that no stage emits, InvalidRequest for a start that cannot take a client's text.
    """
    stages = plan.stages_for(modalities)
    text_edge = ""
    if start is not None:
        text_edge = _text_edge(plan, start)
        downstream = reachable(
            (start,), successors([s.name for s in plan.stages], [(e.source, e.to) for e in plan.edges])
        )
        stages = tuple(s for s in stages if s.name in downstream)
        _check_inputs(plan, start, frozenset(s.name for s in stages))
    emits = {s.name: modalities & frozenset(s.emits) for s in stages if modalities & frozenset(s.emits)}
    missing = modalities - frozenset(m for ms in emits.values() for m in ms)
    if missing or not modalities:
        raise KeyError(f"no stage of {plan.pipeline} emits {sorted(missing)}")
    final = set(emits)
    if code_edges:
        names = {s.name for s in stages}
        final |= {e.source for e in plan.edges if e.payload == "codec_frames" and {e.source, e.to} <= names}
    return RequestSpec(
        request=request,
        modalities=modalities,
        stages=tuple(s.name for s in stages),
        emits=MappingProxyType(emits),
        final=frozenset(final),
        start=start or plan.stages[0].name,
        text_edge=text_edge,
        tenant=tenant,
    )


def _text_edge(plan: ResolvedPlan, start: StageName) -> str:
    """The edge whose place the client's text takes; "" for a stage that nothing feeds."""
    names = [s.name for s in plan.stages]
    if start not in names:
        raise InvalidRequest(f"start stage: {start!r} is not in pipeline {plan.pipeline}; use {', '.join(names)}")
    incoming = plan.edges_to(start)
    for edge in incoming:
        if edge.payload is PayloadContract.TEXT_SEGMENTS:
            return edge.name
    if incoming:
        payloads = ", ".join(f"{e.payload.value} of {e.source}" for e in incoming)
        raise InvalidRequest(f"start stage: {start!r} takes {payloads}, not text; start at {names[0]!r}")
    return ""


def _check_inputs(plan: ResolvedPlan, start: StageName, stages: frozenset[StageName]) -> None:
    """No stage may wait for one that is left out: it would wait until its deadline (R5)."""
    for edge in plan.edges:
        if edge.to in stages and edge.to != start and edge.source not in stages:
            raise InvalidRequest(
                f"start stage: {start!r} leaves out {edge.source!r}, and {edge.to!r} needs its {edge.payload.value}; "
                f"start at {plan.stages[0].name!r}"
            )
