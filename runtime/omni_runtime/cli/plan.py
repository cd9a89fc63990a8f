"""A resolved plan for a person. The command around it is omni_operator.cli.plan, which knows whether the plan fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_runtime.deploy.plan import EdgePlan, ReplicaBounds, ResolvedPlan, StagePlan


def render(resolved: ResolvedPlan, *, origins: bool = False) -> Iterable[str]:
    """The plan for a person: stages, edges, and on request the origin of each value."""
    yield f"{resolved.pipeline}  topology {resolved.topology}  revision {resolved.revision}"
    yield f"model {resolved.model.uri}, served as {resolved.model.served_name}"
    yield ""
    yield from table(
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
    yield from table(
        ("EDGE", "PAYLOAD", "CONNECTOR", "MODE", "CHUNK FRAMES (first / then / left context)"),
        [
            (
                f"{edge.source} -> {edge.to}",
                str(edge.payload),
                _connector(resolved, edge),
                edge.mode,
                _chunks(edge),
            )
            for edge in resolved.edges
        ],
    )
    if origins:
        yield ""
        yield from table(("VALUE", "FROM"), list(resolved.origins.items()))


def _connector(resolved: ResolvedPlan, edge: EdgePlan) -> str:
    """With what depends on the profile, and on the nodes where pods come to be."""
    source, to = resolved.stage(edge.source), resolved.stage(edge.to)
    by_rdma = edge.connector == "Mooncake" and source.rdma is not None and source.pod_group != to.pod_group
    way = f"{edge.connector} by RDMA" if by_rdma else edge.connector
    return f"{way}, SharedMemory on one node" if edge.near else way


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
