"""`omni plan`: what a pipeline becomes, what it needs, and whether it fits. Creates nothing anywhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.cli.facts import Facts, cluster_facts, file_facts, load_prices, read_profiles
from omni_operator.cli.model_files import read_parts
from omni_operator.cli.placement_json import placement_json
from omni_operator.cli.placement_text import render_placement
from omni_operator.placement import Catalogue, ClusterView, Infeasible, Verdict, check_placement, stage_paths
from omni_operator.placement.modelfacts import ModelPart
from omni_runtime.cli.plan import render
from omni_runtime.deploy.load import LOCAL_PROFILE, load_pipeline, local_profiles
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidPipeline

INVALID, DOES_NOT_FIT = 1, 3
ONLY_THE_CPU = (
    "without --profiles there is only this machine's CPU, as profile 'cpu'; the chart's profiles are in "
    "charts/omni-operator/values.yaml, those of a cluster are read with --cluster"
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file with an OmniPipeline.")],
    profiles: Annotated[
        Path | None,
        typer.Option(
            "--profiles",
            help="YAML file with OmniRuntimeProfiles, or the chart's values. Without it: those of --cluster, else this machine's CPU.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Which OmniPipeline, if the file has several.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Plan for `omni run` instead of Kubernetes.")] = False,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--nodes",
            help="Check against nodes: a YAML or JSON file (kubectl get nodes,pods -A -o yaml), or CLASS=NODESxDEVICES. Repeatable.",
        ),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check against the cluster of the current kubeconfig.")
    ] = False,
    autoscaler: Annotated[bool, typer.Option("--autoscaler", help="Nodes like those there may be added.")] = False,
    domain: Annotated[
        str | None, typer.Option("--domain-label", help="Node label of the domain in which hot edges should stay.")
    ] = None,
    model_dir: Annotated[
        Path | None, typer.Option("--model-dir", help="Folder of the model: weights are then read from its own files.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option("--prices", help="YAML file: device class -> price of one device and hour.")
    ] = None,
    origins: Annotated[bool, typer.Option("--origins", help="List where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and verdict as JSON.")] = False,
) -> None:
    """Resolve a pipeline file, show the plan, its memory and whether it fits.

    Exit code 0: it fits (or nodes that may be added make it fit). 1: the spec is wrong, one error a line. 3: it does
    not fit; the last lines say what stands in the way and the smallest change that helps.
    """
    try:
        facts = _facts(nodes or [], cluster, file, name, autoscaler, domain)
        known = read_profiles(profiles) if profiles else facts.profiles or local_profiles()
        pipeline = load_pipeline(file, name)
        resolved = resolve(
            pipeline,
            known,
            target="local" if local else "kubernetes",
            default_profile=None if profiles or facts.profiles else LOCAL_PROFILE,
        )
        catalogue = Catalogue.of(known)
        view = facts.view_for(catalogue)
        parts = read_parts(model_dir, resolved) if model_dir else None
        price_of = load_prices(prices) if prices else {}
    except InvalidPipeline as invalid:
        for error in invalid.errors:
            print(error, file=sys.stderr)
        if not profiles and not cluster and any(error.path.endswith("runtimeProfile") for error in invalid.errors):
            print(ONLY_THE_CPU, file=sys.stderr)
        raise typer.Exit(INVALID) from invalid
    verdict = None if local else _check(pipeline, resolved, view, catalogue, parts)
    if as_json:
        answer = {"plan": msgspec.to_builtins(resolved), "placement": placement_json(verdict)}
        print(msgspec.json.format(msgspec.json.encode(answer, order="sorted"), indent=2).decode())
    else:
        lines = list(render(resolved, origins=origins))
        if verdict is not None:
            lines += render_placement(resolved, verdict, view, price_of)
        print("\n".join(lines))
    if isinstance(verdict, Infeasible):
        raise typer.Exit(DOES_NOT_FIT)


def _facts(
    nodes: list[str], cluster: bool, file: Path, name: str | None, autoscaler: bool, domain: str | None
) -> Facts:
    if cluster:
        pipeline = load_pipeline(file, name)
        return cluster_facts(pipeline.metadata.namespace or "default", pipeline.metadata.name, autoscaler, domain)
    return file_facts(nodes, autoscaler, domain)


def _check(
    pipeline: OmniPipeline,
    resolved: ResolvedPlan,
    view: ClusterView,
    catalogue: Catalogue,
    parts: Mapping[str, ModelPart] | None,
) -> Verdict:
    paths = stage_paths(pipeline.spec)
    return check_placement(resolved, view, catalogue=catalogue, parts=parts, paths=paths)
