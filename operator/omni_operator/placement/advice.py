"""The smallest change that makes a pipeline feasible: candidates for what stands in the way, each of them tried. Pure.

One change first; where none is enough, two, then three: more devices per replica may need another node as well.
Whatever is offered was checked by the same evaluation that refused the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from omni_operator.placement import changes
from omni_operator.placement.budgets import over_budget, over_quota
from omni_operator.placement.changes import NODE_KINDS, Change
from omni_operator.placement.demand import ENTRY, PodDemand, human
from omni_operator.placement.edits import last_words
from omni_operator.placement.evaluate import Facts, evaluate
from omni_operator.placement.obey import obey_rules
from omni_operator.placement.question import Question
from omni_operator.placement.shapes import add_nodes, node_shapes
from omni_operator.placement.types import ConstraintKind, Feasible, Fix, Infeasible
from omni_runtime.errors import FieldError

MAX_CHANGES = 4
MAX_FIXES = 3
MAX_TRIES, MANY_KINDS, FEWER_TRIES = 120, 100, 30  # admission waits for the advice: less of it on very mixed clusters
MAX_ADDED_NODES = 64
MAX_STRAIGHT = 12


@dataclass(slots=True)
class _Tries:
    left: int

    @classmethod
    def for_(cls, question: Question) -> _Tries:
        return cls(MAX_TRIES if len(question.fleet or ()) <= MANY_KINDS else FEWER_TRIES)

    def ask(self, question: Question, *, explain: bool = True) -> Facts | None:
        """None when enough was tried."""
        if self.left <= 0:
            return None
        self.left -= 1
        return evaluate(question, explain=explain)


@dataclass(frozen=True, slots=True)
class _State:
    question: Question
    facts: Facts
    steps: tuple[Change, ...]


def advise(question: Question, facts: Facts, most: int = MAX_FIXES, *, nodes: bool = True) -> tuple[Fix, ...]:
    """So many fixes at most, with the fewest changes. nodes=False: none that adds a node."""
    if not most:
        return ()
    tries = _Tries.for_(question)
    frontier = [_State(question, facts, ())]
    for _ in range(MAX_CHANGES):
        fixes: list[Fix] = []
        texts: set[tuple[str, ...]] = set()
        following: list[_State] = []
        for state in frontier:
            for change in _candidates(state, tries, nodes):
                if (key := (*(s.text for s in state.steps), change.text)) in texts:
                    continue
                texts.add(key)
                reached = tries.ask(change.question)
                if reached is None:
                    return tuple(fixes) or (_straight(question, facts) if nodes else ())
                steps = (*state.steps, change)
                if isinstance(reached.verdict, Feasible):
                    fixes.append(_fix(steps))
                    if len(fixes) == most:
                        return tuple(fixes)
                elif isinstance(reached.verdict, Infeasible):
                    following.append(_State(change.question, reached, steps))
        if fixes:
            return tuple(fixes)
        frontier = following[:8]
    return _straight(question, facts) if nodes else ()


def _straight(question: Question, facts: Facts) -> tuple[Fix, ...]:
    """Where much is wrong at once: one way out, by what cures each constraint alone. Not the smallest, but it was tried."""
    state, tries = _State(question, facts, ()), _Tries(MAX_STRAIGHT)
    while isinstance(state.facts.verdict, Infeasible):
        change = _cure(state)
        reached = tries.ask(change.question) if change is not None else None
        if change is None or reached is None:
            return ()
        state = _State(change.question, reached, (*state.steps, change))
    return (_fix(state.steps),)


def _cure(state: _State) -> Change | None:
    """What always takes one constraint away: more quota, more budget, nodes for all pods of a group; else the first idea."""
    verdict = state.facts.verdict
    assert isinstance(verdict, Infeasible)
    found = _candidates(state, _Tries(0), nodes=False)
    if verdict.constraint.kind in NODE_KINDS:
        groups = _groups(state, verdict)
        shape = next(iter(node_shapes(state.question, groups[0])), None) if groups else None
        return add_nodes(state.question, groups[0], shape, max(1, groups[0].replicas)) if shape else None
    if verdict.constraint.kind in (ConstraintKind.QUOTA, ConstraintKind.TENANT_BUDGET):
        return list(found)[-1]
    return next(found, None)


def grow(question: Question, facts: Facts) -> tuple[Question, Feasible] | None:
    """Nodes that an autoscaler would have to add for the plan as it is; None where nodes alone do not help."""
    tries = _Tries.for_(question)
    state = _State(question, facts, ())
    for _ in range(MAX_ADDED_NODES):
        verdict = state.facts.verdict
        if isinstance(verdict, Feasible):
            return state.question, verdict
        if not isinstance(verdict, Infeasible) or verdict.constraint.kind not in NODE_KINDS:
            return None
        change = next((c for d in _groups(state, verdict) for c in _more_nodes(state, d, tries)), None)
        reached = tries.ask(change.question) if change is not None else None
        if change is None or reached is None:
            return None
        state = _State(change.question, reached, ())
    return None


def with_advice(question: Question, verdict: Infeasible, fixes: tuple[Fix, ...]) -> Infeasible:
    """The errors of the verdict with the first fix: of several changes, those for the stage of the error."""
    if not fixes:
        return verdict
    errors = tuple(
        e if e.fix else FieldError(e.path, e.value, e.problem, _for_path(question, e.path, fixes[0].text))
        for e in verdict.errors
    )
    return replace(verdict, errors=errors, fixes=fixes)


def _for_path(question: Question, path: str, text: str) -> str:
    stage = next((s.name for s in question.plan.stages if path.startswith(question.path(s.name))), None)
    parts = [part for part in text.split("; ") if stage is not None and f" of {stage} to " in part]
    return "; ".join(parts) or text


def _fix(steps: tuple[Change, ...]) -> Fix:
    last = steps[-1].question
    single = steps[0] if len(steps) == 1 else None
    return Fix(
        text=last_words(s.text for s in steps),
        plan=last.plan,
        cluster=last.cluster,
        path=single.path if single else "",
        value=single.value if single else "",
    )


def _candidates(state: _State, tries: _Tries, nodes: bool) -> Iterator[Change]:
    question, verdict = state.question, state.facts.verdict
    assert isinstance(verdict, Infeasible)
    kind = verdict.constraint.kind
    if kind is ConstraintKind.DEVICE_MEMORY:
        yield from changes.memory_changes(question, verdict)
    elif kind is ConstraintKind.SHARED_DEVICE:
        yield from changes.unshare(question, verdict)
    elif kind is ConstraintKind.INCOMPATIBLE:
        yield from obey_rules(question, verdict)
    elif kind is ConstraintKind.QUOTA:
        yield from _fewer(state, tries)
        yield from _fewer_devices(state)
        needed = {(q.name, key): amount for q, key, amount, _ in over_quota(state.facts.demands, question.cluster)}
        words = {at: human(at[1].rpartition("requests.")[2].rpartition("limits.")[2], n) for at, n in needed.items()}
        yield changes.raise_quota(question, needed, words)
    elif kind is ConstraintKind.TENANT_BUDGET:
        yield from _fewer(state, tries)
        yield from _fewer_devices(state)
        yield changes.raise_budget(
            question, {name: n for _, name, n, _ in over_budget(state.facts.demands, question.cluster)}
        )
    elif kind is ConstraintKind.DOMAIN:
        yield changes.ignore_domain(question)
    if kind in NODE_KINDS or kind is ConstraintKind.DOMAIN:
        yield from _node_changes(state, tries, nodes)


def _fewer(state: _State, tries: _Tries) -> Iterator[Change]:
    """Of the groups that use most first."""
    for group in state.facts.verdict.constraint.stages if isinstance(state.facts.verdict, Infeasible) else ():
        change = changes.fewer_replicas(state.question, group, lambda q: _feasible(tries, q))
        if change is not None:
            yield change


def _fewer_devices(state: _State) -> Iterator[Change]:
    for demand in state.facts.demands:
        yield from changes.lower_tensor(state.question, demand.group)


def _feasible(tries: _Tries, question: Question) -> bool:
    facts = tries.ask(question, explain=False)
    return facts is not None and isinstance(facts.verdict, Feasible)


def _node_changes(state: _State, tries: _Tries, nodes: bool) -> Iterator[Change]:
    question, verdict = state.question, state.facts.verdict
    assert isinstance(verdict, Infeasible)
    groups = _groups(state, verdict)
    for demand in groups:
        yield from changes.without_rdma(question, demand.group, verdict.constraint.resource or "")
    for demand in groups:
        change = changes.fewer_replicas(question, demand.group, lambda q: _feasible(tries, q))
        if change is not None:
            yield change
    for demand in groups:
        yield from changes.lower_tensor(question, demand.group)
        if demand.group != ENTRY and demand.device_resource:
            leader = question.plan.stage(demand.group)
            yield from list(changes.class_changes(question, leader))[:3]
        if verdict.constraint.resource == "cpu":
            yield from changes.less_cpu(question, demand.group, _missing_cpu(question, demand))
    if nodes:
        for demand in groups:
            yield from _more_nodes(state, demand, tries)


def _more_nodes(state: _State, demand: PodDemand, tries: _Tries) -> Iterator[Change]:
    """For each kind of node the smallest number with which all of it fits, else as many as the group has pods."""
    for shape in list(node_shapes(state.question, demand))[:3]:
        count = 1
        while count <= min(demand.replicas, MAX_ADDED_NODES):
            change = add_nodes(state.question, demand, shape, count)
            if _feasible(tries, change.question):
                break
            count = count + 1 if count < 4 else count * 2
        yield add_nodes(state.question, demand, shape, min(count, max(1, demand.replicas)))


def _groups(state: _State, verdict: Infeasible) -> list[PodDemand]:
    """The demands that the constraint names (it may name stages that are not leaders), hungriest first."""
    named = set(verdict.constraint.stages)
    found = [d for d in state.facts.demands if d.group in named or named & set(d.stages)]
    return sorted(found, key=lambda d: (d.device_resource is None, -d.replicas * sum(d.requests.values())))


def _missing_cpu(question: Question, demand: PodDemand) -> int:
    free = max((k.node.allocatable.get("cpu", 0) - k.node.used.get("cpu", 0) for k in question.fleet or ()), default=0)
    return max(0, demand.requests.get("cpu", 0) - free)
