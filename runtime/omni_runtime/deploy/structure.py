"""The graph of a pipeline: which stages and edges there are, in which order, and what is wrong with it. Pure.

Knows names, engines and contracts; devices, images and chunk sizes come later.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni_crds.v1alpha1.pipeline import EdgeSpec, PipelineSpec, StageSpec
from omni_runtime.deploy.overlay import Violations
from omni_runtime.topology import graph
from omni_runtime.topology.engines import ENGINES, payloads_between
from omni_runtime.topology.registry import CUSTOM, one_of
from omni_runtime.topology.types import EdgeTemplate, EngineKind, Modality, PayloadContract, StageTemplate, Topology

Ends = tuple[str, str]  # names of the producer and the consumer

# `P-entry` and `P-entry-control` are the entry's own objects in pipeline P; a stage's objects are named `P-STAGE`.
RESERVED_STAGE_NAMES = frozenset({"entry", "entry-control"})


@dataclass(frozen=True, slots=True)
class StageNode:
    """One stage before the overlay. `path` is where a complaint about it points to."""

    template: StageTemplate
    spec: StageSpec | None
    path: str

    @property
    def name(self) -> str:
        return self.template.name


@dataclass(frozen=True, slots=True)
class _AskedEdge:
    """An edge whose ends exist; nothing else about it is checked yet."""

    ends: Ends
    spec: EdgeSpec | None
    path: str


@dataclass(frozen=True, slots=True)
class EdgeNode:
    template: EdgeTemplate
    spec: EdgeSpec | None
    path: str


@dataclass(frozen=True, slots=True)
class Structure:
    """Stages in topological order, edges in the order of their ends."""

    stages: tuple[StageNode, ...]
    edges: tuple[EdgeNode, ...]
    required_for: dict[str, tuple[Modality, ...]]


def resolve_structure(spec: PipelineSpec, topology: Topology, bad: Violations) -> Structure | None:
    """The graph, or None when it is too broken to look at what hangs on it. Violations go into `bad`."""
    before = len(bad.found)
    stages = _stages(spec, topology, bad)
    names = [s.name for s in stages]
    asked = _asked_edges(spec, topology, names, bad)
    _check_cycle(names, asked, bad)
    templates = {s.name: s.template for s in stages}
    edges = [e for e in (_edge_node(a, templates, topology, bad) for a in asked) if e is not None]
    if len(bad.found) > before or not stages:
        return None
    ends = [a.ends for a in asked]
    order = graph.topological_order(names, ends)
    assert order is not None, "a graph without a cycle has an order"
    by_name = {s.name: s for s in stages}
    ordered = tuple(by_name[name] for name in order)
    _check_flow(ordered, ends, bad)
    rank = {name: i for i, name in enumerate(order)}
    edges.sort(key=lambda e: (rank[e.template.source], rank[e.template.to]))
    return Structure(ordered, tuple(edges), _required_for(ordered, ends))


def _stages(spec: PipelineSpec, topology: Topology, bad: Violations) -> list[StageNode]:
    custom = topology.name == CUSTOM.name
    given: dict[str, tuple[str, StageSpec]] = {}
    known = [t.name for t in topology.stages]
    for i, stage in enumerate(spec.stages or ()):
        path = f"spec.stages[{i}]"
        if custom and stage.name in RESERVED_STAGE_NAMES:
            bad.add(f"{path}.name", stage.name, "the entry's own objects have this name", "give the stage another name")
        if stage.name in given:
            first = given[stage.name][0]
            bad.add(f"{path}.name", stage.name, f"{first} has the same name", "give each stage its own name")
        elif not custom and stage.name not in known:
            bad.add(
                f"{path}.name",
                stage.name,
                f"topology {topology.name} has no such stage",
                f"use {one_of(stage.name, known)}",
            )
        else:
            given[stage.name] = (path, stage)
    if not custom:
        return [_registered(t, given.get(t.name), topology, bad) for t in topology.stages]
    if not given:
        bad.add(
            "spec.stages",
            "",
            "topology custom needs its stages spelled out",
            "list each stage with its name and engine",
        )
    # By name, so that the order in which a user lists the stages does not change the revision.
    nodes = [_spelled_out(path, stage, bad) for _, (path, stage) in sorted(given.items())]
    return [node for node in nodes if node is not None]


def _registered(
    template: StageTemplate, given: tuple[str, StageSpec] | None, topology: Topology, bad: Violations
) -> StageNode:
    if given is None:
        return StageNode(template, None, f"spec.stages[name={template.name}]")
    path, stage = given
    if stage.engine is not None and stage.engine != template.engine:
        bad.add(
            f"{path}.engine",
            stage.engine,
            f"topology {topology.name} runs stage {template.name} on {template.engine}",
            "remove the field, or use topology custom",
        )
    return StageNode(template, stage, path)


def _spelled_out(path: str, stage: StageSpec, bad: Violations) -> StageNode | None:
    kinds = [kind.value for kind in EngineKind]
    if stage.engine is None:
        bad.add(
            f"{path}.engine", "", "a stage of topology custom needs an engine", f"use one of {', '.join(sorted(kinds))}"
        )
        return None
    if stage.engine not in kinds:
        bad.add(f"{path}.engine", stage.engine, "unknown engine", f"use {one_of(stage.engine, kinds)}")
        return None
    kind = EngineKind(stage.engine)
    return StageNode(StageTemplate(name=stage.name, engine=kind, emits=ENGINES[kind].emits), stage, path)


def _asked_edges(spec: PipelineSpec, topology: Topology, names: Sequence[str], bad: Violations) -> list[_AskedEdge]:
    """Edges between two different known stages, each once: those of the spec, then the topology's others."""
    # Stages that were left out because something else is wrong with them are still known names.
    known = list(dict.fromkeys([*names, *(s.name for s in spec.stages or () if topology.name == CUSTOM.name)]))
    asked: dict[Ends, _AskedEdge] = {}
    for i, edge in enumerate(spec.edges or ()):
        path, ends = f"spec.edges[{i}]", (edge.source, edge.to)
        unknown = [(field, name) for field, name in zip(("from", "to"), ends, strict=True) if name not in known]
        for field, name in unknown:
            bad.add(f"{path}.{field}", name, "no stage has this name", f"use {one_of(name, known)}")
        if unknown:
            continue
        if edge.source == edge.to:
            bad.add(f"{path}.to", edge.to, "an edge from a stage to itself", "name two different stages")
        elif ends in asked:
            bad.add(path, " -> ".join(ends), f"the same edge as {asked[ends].path}", "keep one of them")
        else:
            asked[ends] = _AskedEdge(ends, edge, path)
    for template in topology.edges:
        ends = (template.source, template.to)
        asked.setdefault(ends, _AskedEdge(ends, None, f"spec.edges[from={template.source},to={template.to}]"))
    return list(asked.values())


def _check_cycle(names: Sequence[str], asked: Sequence[_AskedEdge], bad: Violations) -> None:
    nodes = list(dict.fromkeys([*names, *(name for edge in asked for name in edge.ends)]))
    loop = graph.find_cycle(nodes, [edge.ends for edge in asked])
    if loop is None:
        return
    hops = set(itertools.pairwise(loop))
    # The user's last edge of the loop is the one to take out; the topology's own edges never form a loop.
    path = [edge.path for edge in asked if edge.ends in hops and edge.spec is not None][-1]
    bad.add(path, " -> ".join(loop), "these stages wait for each other in a cycle", "remove one of the edges")


def _edge_node(
    asked: _AskedEdge, stages: Mapping[str, StageTemplate], topology: Topology, bad: Violations
) -> EdgeNode | None:
    """The edge with its payload contract, or None after a complaint."""
    edge, path, arrow = asked.spec, asked.path, " -> ".join(asked.ends)
    wanted = PayloadContract(edge.payload) if edge and edge.payload else None
    template = next((t for t in topology.edges if (t.source, t.to) == asked.ends), None)
    if template is not None:
        if wanted is not None and wanted != template.payload:
            bad.add(f"{path}.payload", wanted, f"topology {topology.name} sends {template.payload}", "remove the field")
        return EdgeNode(template, edge, path)
    if topology.name != CUSTOM.name:
        own = ", ".join(f"{t.source} -> {t.to}" for t in topology.edges)
        fix = f"use one of its edges ({own}), or topology custom"
        bad.add(path, arrow, f"topology {topology.name} has no such edge", fix)
        return None
    if any(name not in stages for name in asked.ends):
        return None  # the stage itself was complained about
    source, to = (stages[name].engine for name in asked.ends)
    possible = payloads_between(source, to)
    if not possible:
        takes = ", ".join(ENGINES[to].consumes) or "requests of clients only"
        gives = ", ".join(ENGINES[source].produces) or "nothing to other stages"
        problem = f"engine {source} gives {gives}, and engine {to} takes {takes}"
        bad.add(path, arrow, problem, "connect stages whose engines fit")
        return None
    if wanted is not None and wanted not in possible:
        problem = f"the engines {source} and {to} cannot exchange it"
        bad.add(f"{path}.payload", wanted, problem, f"use {one_of(wanted, possible)}")
        return None
    if wanted is None and len(possible) > 1:
        problem = f"the engines {source} and {to} can exchange several payloads"
        bad.add(f"{path}.payload", "", problem, f"name one of {', '.join(possible)}")
        return None
    payload = wanted or possible[0]
    return EdgeNode(EdgeTemplate(source=asked.ends[0], to=asked.ends[1], payload=payload), edge, path)


def _check_flow(stages: Sequence[StageNode], ends: Sequence[tuple[str, str]], bad: Violations) -> None:
    """Requests enter at the first stage, reach every stage, and every stage is needed for some output."""
    names = [s.name for s in stages]
    fed = {to for _, to in ends}
    entry = next((s for s in stages if s.name not in fed and not ENGINES[s.template.engine].consumes), None)
    if entry is None:
        first = stages[0]
        bad.add(
            f"{first.path}.engine",
            first.template.engine,
            "no stage takes the client's request: each one is fed by an edge, or its engine needs one",
            f"start the graph with an engine that takes requests, such as {EngineKind.AR_VLLM}",
        )
        return
    reached = graph.reachable([entry.name], graph.successors(names, ends))
    for stage in stages:
        if stage.name not in reached:
            bad.add(
                f"{stage.path}.name",
                stage.name,
                f"no edge leads from {entry.name}, where requests enter, to this stage",
                "add an edge to it, or remove the stage",
            )
    emitting = [s.name for s in stages if s.template.emits]
    if not emitting:
        bad.add(
            "spec.stages",
            ", ".join(names),
            "no stage emits anything to the client",
            "end the graph with an engine that emits text or audio",
        )
        return
    needed = graph.ancestors(emitting, names, ends)
    for stage in stages:
        if stage.name not in needed:
            bad.add(
                f"{stage.path}.name",
                stage.name,
                "nothing that is sent to the client needs this stage",
                "add an edge from it, or remove the stage",
            )


def _required_for(stages: Sequence[StageNode], ends: Sequence[tuple[str, str]]) -> dict[str, tuple[Modality, ...]]:
    """Stage -> the outputs that need it: a stage serves all that it feeds."""
    names = [s.name for s in stages]
    needs = {m: graph.ancestors([s.name for s in stages if m in s.template.emits], names, ends) for m in Modality}
    return {name: tuple(m for m in Modality if name in needs[m]) for name in names}
