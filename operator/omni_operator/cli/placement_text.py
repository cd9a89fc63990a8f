"""A verdict for a person: memory as bars, pods on nodes, cost, and what stands in the way. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from omni_operator.placement import (
    ClusterView,
    Feasible,
    FeasibleIfNodesAreAdded,
    Infeasible,
    NodeView,
    StageMemory,
    Verdict,
    Witness,
    plan_demand,
)
from omni_operator.placement.budgets import class_use
from omni_operator.placement.demand import PodDemand, human
from omni_operator.placement.memory import concurrent_requests
from omni_runtime.cli.plan import table
from omni_runtime.deploy.plan import ResolvedPlan

GIB = 1 << 30
WIDTH = 32
LINE = 118
# Weights, KV cache, everything else; the rest of the stage's share; what is not its own.
WEIGHTS, CACHE, OTHER, SHARE, REST = "█", "▓", "▒", "░", "·"
MAX_NODES = 12


def render_placement(
    plan: ResolvedPlan, verdict: Verdict, cluster: ClusterView, prices: Mapping[str, float]
) -> Iterator[str]:
    demands = plan_demand(plan, {}, {})
    yield ""
    yield from _memory(verdict.memory)
    witness = verdict.witness if isinstance(verdict, (Feasible, FeasibleIfNodesAreAdded)) else None
    if witness is not None:
        yield ""
        yield from _nodes(witness, demands, cluster)
    yield ""
    yield from _cost(plan, demands, prices)
    yield ""
    yield from _verdict(verdict, cluster)


def _memory(memory: Sequence[StageMemory]) -> Iterator[str]:
    yield (
        f"MEMORY of one device, or of the container on a CPU: {WEIGHTS} weights  {CACHE} KV cache  {OTHER} other  {SHARE} left of its share  "
        f"{REST} not this stage's"
    )
    width = max((len(m.stage) for m in memory), default=0)
    for m in memory:
        if not m.known:
            yield f"{m.stage.ljust(width)}  {SHARE * WIDTH}  not known; its share is {m.budget / GIB:.1f} GiB"
            continue
        missing = f", {m.missing / GIB:.1f} missing" if m.missing else ""
        yield f"{m.stage.ljust(width)}  {bar(m)}  {m.need / GIB:.1f} of {m.budget / GIB:.1f} GiB{missing}"
        terms = ", ".join(f"{t.name} {t.bytes / GIB:.2f}" for t in m.terms)
        room = concurrent_requests(m)
        if room is not None and not m.missing:
            terms += f"; KV cache for {room:.0f} requests of full length"
        yield from textwrap.wrap(terms, LINE, initial_indent=" " * (width + 2), subsequent_indent=" " * (width + 2))


def bar(memory: StageMemory, width: int = WIDTH) -> str:
    """The device as `width` cells. What does not fit is cut at the device's end."""
    cell = memory.capacity / width
    ends = []
    so_far = 0
    parts = {WEIGHTS: 0, CACHE: 0, OTHER: 0}
    for t in memory.terms:
        kind = WEIGHTS if t.name == "weights" else CACHE if t.name in ("KV cache", "KV slots") else OTHER
        parts[kind] += t.bytes
    for mark, size in parts.items():
        so_far += size
        ends.append((mark, min(width, round(so_far / cell))))
    ends.append((SHARE, max(ends[-1][1], round(memory.budget / cell))))
    ends.append((REST, width))
    text = ""
    for mark, end in ends:
        text += mark * (end - len(text))
    return text


def _nodes(witness: Witness, demands: Sequence[PodDemand], cluster: ClusterView) -> Iterator[str]:
    by_group = {d.group: d for d in demands}
    nodes = {n.name: n for n in (*(cluster.nodes or ()), *witness.added_nodes)}
    on: dict[str, list[str]] = {}
    for p in witness.placements:
        on.setdefault(p.node, []).append(f"{p.group}-{p.replica}" if by_group[p.group].replicas > 1 else p.group)
    rows = []
    for name in sorted(on)[:MAX_NODES]:
        placed = [by_group[p.group] for p in witness.placements if p.node == name]
        rows.append((name, _devices(nodes[name], placed), _share("cpu", nodes[name], placed),
                     _share("memory", nodes[name], placed), ", ".join(on[name])))  # fmt: skip
    yield from table(("NODE", "DEVICES (used by others ■, by this pipeline ●)", "CPU", "MEMORY", "PODS"), rows)
    if len(on) > MAX_NODES:
        yield f"and {len(on) - MAX_NODES} more nodes"


def _devices(node: NodeView, placed: Sequence[PodDemand]) -> str:
    parts = []
    for resource, count in sorted(node.allocatable.items()):
        if "/" not in resource:
            continue
        others = node.used.get(resource, 0)
        mine = sum(d.requests.get(resource, 0) for d in placed)
        marks = (
            "■" * others + "●" * mine + "□" * max(0, count - others - mine)
            if count <= 16
            else f"{others + mine}/{count}"
        )
        parts.append(f"{resource} {marks}")
    return "  ".join(parts) or "none"


def _share(resource: str, node: NodeView, placed: Sequence[PodDemand]) -> str:
    asked = node.used.get(resource, 0) + sum(d.requests.get(resource, 0) for d in placed)
    have = node.allocatable.get(resource, 0)
    return f"{asked / have:.0%}" if have else "-"


def _cost(plan: ResolvedPlan, demands: Sequence[PodDemand], prices: Mapping[str, float]) -> Iterator[str]:
    use = class_use(demands)
    if not use:
        cpu, memory = (sum(d.requests.get(k, 0) * d.replicas for d in demands) for k in ("cpu", "memory"))
        yield f"COST no accelerators; {human('cpu', cpu)} and {human('memory', memory)} requested"
        return
    parts = [f"{count} x {name}" for name, count in sorted(use.items())]
    line = f"COST {', '.join(parts)}"
    known = {name: prices[name] for name in use if name in prices}
    if known:
        line += f", {sum(known[n] * use[n] for n in known):.2f} per hour"
        if len(known) < len(use):
            line += f" without {', '.join(sorted(set(use) - set(known)))}, which has no price"
    yield line
    most = {
        leader: bounds.maximum
        for leader in plan.pod_groups()
        if (bounds := plan.replicas.get(leader)) and bounds.maximum and bounds.maximum > bounds.initial
    }
    if most:
        yield f"     up to {', '.join(f'{n} replicas of {leader}' for leader, n in most.items())}"


def _verdict(verdict: Verdict, cluster: ClusterView) -> Iterator[str]:
    if isinstance(verdict, Feasible):
        known = (
            "every pod has a place"
            if verdict.witness
            else "memory and devices fit; no nodes were given (--nodes, --cluster)"
        )
        yield f"VERDICT feasible: {known}"
    elif isinstance(verdict, FeasibleIfNodesAreAdded):
        count = len(verdict.witness.added_nodes)
        yield f"VERDICT feasible if {count} node{'s are' if count > 1 else ' is'} added"
        yield from _wrapped("because  ", verdict.constraint.message)
    elif isinstance(verdict, Infeasible):
        yield f"VERDICT {'infeasible' if verdict.proven else 'no placement found, and no proof that there is none'}"
        yield from _wrapped("because  ", verdict.constraint.message)
    if isinstance(verdict, (Infeasible, FeasibleIfNodesAreAdded)):
        for number, fix in enumerate(verdict.fixes):
            yield from _wrapped("fix      " if number == 0 else "or       ", fix.text)
    for warning in verdict.warnings:
        yield from _wrapped("warning  ", str(warning))


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, LINE, initial_indent=f"  {label}", subsequent_indent=" " * (2 + len(label)))
