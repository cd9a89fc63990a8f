"""Does a pipeline fit, before anything of it is created? Pure: values in, a verdict out; no I/O, no clock.

    verdict = check_placement(plan, cluster, catalogue=Catalogue.of(profiles), paths=stage_paths(pipeline.spec))

- `plan` is what `omni_runtime.deploy.resolve` returns; `cluster` a `ClusterView` (`nodes=None` where none is known).
- `Feasible(witness)`: every pod has a node in `witness`; `verify_witness`, which shares no code with the solver, agrees.
- `FeasibleIfNodesAreAdded`: only where `cluster.nodes_may_be_added`; `witness.added_nodes` says which.
- `Infeasible(constraint, errors, fixes, proven)`: `errors` name field, value, problem and fix; every fix was tried.
- All verdicts carry `memory` (per stage and device, term by term) and `warnings`.

`views` builds a ClusterView from Kubernetes objects; a `NodeView` may be cached per resourceVersion of its node.
`replicas` overrides the counts per pod group (the reconciler passes what the OmniStages say).
"""

from omni_operator.placement.check import check_placement
from omni_operator.placement.demand import plan_demand, pod_resources
from omni_operator.placement.devices import Catalogue
from omni_operator.placement.question import stage_paths
from omni_operator.placement.types import (
    ClusterView,
    Constraint,
    ConstraintKind,
    Feasible,
    FeasibleIfNodesAreAdded,
    Fix,
    Infeasible,
    MemoryTerm,
    NodeView,
    Placement,
    PlacementWarning,
    QuotaView,
    StageMemory,
    Taint,
    TenantView,
    Verdict,
    Witness,
)
from omni_operator.placement.witness import verify_witness

__all__ = [
    "Catalogue",
    "ClusterView",
    "Constraint",
    "ConstraintKind",
    "Feasible",
    "FeasibleIfNodesAreAdded",
    "Fix",
    "Infeasible",
    "MemoryTerm",
    "NodeView",
    "Placement",
    "PlacementWarning",
    "QuotaView",
    "StageMemory",
    "Taint",
    "TenantView",
    "Verdict",
    "Witness",
    "check_placement",
    "plan_demand",
    "pod_resources",
    "stage_paths",
    "verify_witness",
]
