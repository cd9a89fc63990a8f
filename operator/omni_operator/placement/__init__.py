"""Does a pipeline fit, before anything of it is created? Pure: values in, a verdict out; no I/O, no clock.

    verdict = check_placement(plan, cluster, catalogue=Catalogue.of(profiles), paths=stage_paths(pipeline.spec))

- `plan` is what `omni_runtime.deploy.resolve` returns; `cluster` a `ClusterView` (`nodes=None` where none is known).
- `Feasible(witness)`: every pod has a node in `witness`, an independent checker (`verify_witness`) agrees.
- `FeasibleIfNodesAreAdded`: only where `cluster.nodes_may_be_added`; says which nodes.
- `Infeasible(constraint, errors, fixes, proven)`: `errors` name field, value, problem and fix; every fix was checked.
- All verdicts carry `memory` (per stage and device, term by term) and `warnings`.

`observe_cluster` (in `views`) builds a ClusterView from Kubernetes objects; `NodeView`s may be cached per node version.
`replicas` overrides the counts per pod group (the reconciler passes what the OmniStages say).
"""
