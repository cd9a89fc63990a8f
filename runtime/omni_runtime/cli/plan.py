"""`omni plan`: what would run, and where each value comes from. Reads files only; no cluster is asked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from omni_runtime.deploy.load import LOCAL_PROFILE, load_pipeline, load_profiles, local_profiles
from omni_runtime.deploy.plan import EdgePlan, ReplicaBounds, ResolvedPlan, StagePlan, canonical_json
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidPipeline

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file with an OmniPipeline.")],
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", help="YAML file with OmniRuntimeProfiles. Without it: this machine's CPU."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Which OmniPipeline, if the file has several.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Plan for `omni run` instead of Kubernetes.")] = False,
    origins: Annotated[bool, typer.Option("--origins", help="List where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, as pods read it.")] = False,
) -> None:
    """Resolve a pipeline file and show the plan; exit code 1 with one error a line if it cannot be resolved."""
    try:
        known = load_profiles(profiles) if profiles else local_profiles()
        resolved = resolve(
            load_pipeline(file, name),
            known,
            target="local" if local else "kubernetes",
            default_profile=None if profiles else LOCAL_PROFILE,
        )
    except InvalidPipeline as invalid:
        for error in invalid.errors:
            print(error, file=sys.stderr)
        raise typer.Exit(1) from invalid
    if as_json:
        print(msgspec.json.format(canonical_json(resolved), indent=2).decode())
    else:
        print("\n".join(render(resolved, origins=origins)))


def render(resolved: ResolvedPlan, *, origins: bool = False) -> Iterable[str]:
    """The plan for a person: stages, edges, and on request the origin of each value."""
    yield f"{resolved.pipeline}  topology {resolved.topology}  revision {resolved.revision}"
    yield f"model {resolved.model.uri}, served as {resolved.model.served_name}"
    yield ""
    yield from _table(
        ("STAGE", "ENGINE", "PROFILE", "DEVICES", "PODS", "REPLICAS", "CPU", "MEMORY", "SHM", "NEEDED FOR"),
        [
            (
                stage.name,
                str(stage.engine),
                stage.profile,
                _devices(stage),
                stage.name if stage.pod_group == stage.name else f"with {stage.pod_group}",
                _replicas(resolved.replicas[stage.name]),
                stage.cpu,
                stage.memory,
                stage.shared_memory,
                ", ".join(stage.required_for),
            )
            for stage in resolved.stages
        ],
    )
    yield ""
    yield from _table(
        ("EDGE", "PAYLOAD", "CONNECTOR", "MODE", "CHUNK FRAMES (first / then / left context)"),
        [
            (
                f"{edge.source} -> {edge.to}",
                str(edge.payload),
                edge.connector,
                edge.mode,
                _chunks(edge),
            )
            for edge in resolved.edges
        ],
    )
    if origins:
        yield ""
        yield from _table(("VALUE", "FROM"), list(resolved.origins.items()))


def _chunks(edge: EdgePlan) -> str:
    if not edge.frames:
        return "as produced"
    sizes = f"{edge.initial_frames} / {edge.frames} / {edge.left_context_frames}"
    return sizes if edge.sizing == "fixed" else f"{sizes}, {edge.sizing}"


def _devices(stage: StagePlan) -> str:
    device = stage.device
    if device.resource_name is None:
        return device.device_class
    share = f", {device.memory_fraction:.0%} of memory" if device.memory_fraction < 1 else ""
    return f"{device.count} x {device.device_class} ({device.resource_name}{share})"


def _replicas(bounds: ReplicaBounds) -> str:
    if bounds.requested is not None:
        return str(bounds.requested)
    return str(bounds.minimum) if bounds.maximum is None else f"{bounds.minimum} to {bounds.maximum}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
