"""check_placement: one plan, one cluster, one verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from omni_operator.placement.advice import MAX_FIXES, advise, grow, with_advice
from omni_operator.placement.changes import NODE_KINDS
from omni_operator.placement.devices import Catalogue
from omni_operator.placement.evaluate import evaluate
from omni_operator.placement.fleet import Fleet
from omni_operator.placement.modelfacts import ModelPart
from omni_operator.placement.question import Memo, ask, with_replicas
from omni_operator.placement.shapes import ADDED_PREFIX
from omni_operator.placement.types import (
    ClusterView,
    FeasibleIfNodesAreAdded,
    Infeasible,
    Verdict,
    Witness,
)
from omni_runtime.deploy.plan import ResolvedPlan

NO_PROFILES = Catalogue({})


def check_placement(
    plan: ResolvedPlan,
    cluster: ClusterView,
    *,
    catalogue: Catalogue = NO_PROFILES,
    parts: Mapping[str, ModelPart] | None = None,
    replicas: Mapping[str, int] | None = None,
    paths: Mapping[str, str] | None = None,
    fixes: int = MAX_FIXES,
    fleet: Fleet | None = None,
    memo: Memo | None = None,
) -> Verdict:
    """Whether the pipeline can run on the cluster.

    catalogue: device classes of the profiles (`Catalogue.of`), else the built-in table. parts: what stages load, where
    the model's files were read. replicas: counts by pod group that replace the plan's. paths: `stage_paths(spec)`.
    fixes: how many to look for, which is most of the time that an infeasible pipeline takes. fleet: the nodes of the
    cluster by kind, where somebody keeps them up (`fleet_of` with the relevant labels, or more). memo: shared by the
    questions about one plan with one catalogue.
    """
    question = ask(with_replicas(plan, replicas or {}), cluster, catalogue, parts or {}, paths or {}, fleet, memo)
    facts = evaluate(question)
    verdict = facts.verdict
    if not isinstance(verdict, Infeasible):
        return verdict
    if cluster.nodes_may_be_added and verdict.constraint.kind in NODE_KINDS:
        grown = grow(question, facts)
        if grown is not None:
            more, reached = grown
            assert reached.witness is not None
            added = tuple(n for n in more.cluster.nodes or () if n.name.startswith(ADDED_PREFIX))
            witness = Witness(reached.witness.placements, added)
            rest = advise(question, facts, fixes, nodes=False)
            return FeasibleIfNodesAreAdded(verdict.memory, verdict.warnings, verdict.constraint, witness, rest)
    return with_advice(question, verdict, advise(question, facts, fixes))
