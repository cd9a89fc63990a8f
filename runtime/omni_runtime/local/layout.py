"""Which processes a plan becomes on one machine, with their command lines. Pure, but for the choice of free ports.

The command lines are those of the pods; one sidecar serves all stages, as if they were one pod.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.quantity import parse_quantity

LOOPBACK = "127.0.0.1"
REPLICA_PLACEHOLDER = "{replica}"  # filled in at every start: an identity is never used twice (R37)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. `ready_url` answers 200 when it serves; `order` ranks the stop: lower ends first."""

    name: str
    command: tuple[str, ...]
    ready_url: str
    startup_seconds: float
    order: int
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class LocalFolders:
    """private: 0700, for keys, plan and sockets; shared_memory: where the arena lives; models: prepared models."""

    private: Path
    shared_memory: Path
    models: Path

    @property
    def plan(self) -> Path:
        return self.private / "plan.json"

    @property
    def curve(self) -> Path:
        return self.private / "curve"


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    control: int
    data: int
    sidecar_http: int
    engine_http: tuple[int, ...]


def replica_counts(plan: ResolvedPlan, overrides: Mapping[str, int]) -> dict[str, int]:
    """Replicas of each stage: what was asked for, else the plan's fixed count, else its minimum."""
    counts = {}
    for stage in plan.stages:
        bounds = plan.replicas[stage.name]
        planned = bounds.requested if bounds.requested is not None else max(1, bounds.minimum)
        counts[stage.name] = overrides.get(stage.name, planned)
    return counts


def choose_ports(http: int, engines: int) -> Ports:
    """Free ports of the loopback interface; they are held together while choosing, so none comes twice."""
    with ExitStack() as stack:
        free = []
        for _ in range(engines + 3):
            probe = stack.enter_context(socket.socket())
            probe.bind((LOOPBACK, 0))
            free.append(int(probe.getsockname()[1]))
    return Ports(http, free[0], free[1], free[2], tuple(free[3:]))


def plan_processes(
    plan: ResolvedPlan, counts: Mapping[str, int], folders: LocalFolders, ports: Ports, host: str
) -> tuple[ProcessSpec, ...]:
    """In start order; any order works."""
    arena = sum(int(parse_quantity(stage.shared_memory)) for stage in plan.stages)
    common = ("--plan", str(folders.plan), "--curve", str(folders.curve))
    sidecar = (
        *_module("omni_runtime.connectors.sidecar"),
        *common,
        *("--ipc-dir", str(folders.private), "--shm-dir", str(folders.shared_memory), "--arena-bytes", str(arena)),
        *("--advertise-host", LOOPBACK, "--domain", REPLICA_PLACEHOLDER, "--data-host", LOOPBACK),
        *("--data-port", str(ports.data), "--http-host", LOOPBACK, "--http-port", str(ports.sidecar_http)),
    )
    entry = (
        *_module("omni_runtime.entry"),
        *common,
        *("--http-host", host, "--http-port", str(ports.http)),
        *("--control-host", LOOPBACK, "--control-port", str(ports.control)),
    )
    # The entry is ready when all stages are; that is waited for once, at the end.
    return (
        ProcessSpec("connector", sidecar, f"http://{LOOPBACK}:{ports.sidecar_http}/ready", 30.0, order=2),
        ProcessSpec("entry", entry, f"http://{LOOPBACK}:{ports.http}/livez", 60.0, order=0),
        *_workers(plan, counts, folders, ports, common),
    )


def _workers(
    plan: ResolvedPlan, counts: Mapping[str, int], folders: LocalFolders, ports: Ports, common: tuple[str, ...]
) -> Iterator[ProcessSpec]:
    free = iter(ports.engine_http)
    for stage in plan.stages:
        for index in range(counts[stage.name]):
            port = next(free)
            command = (
                *_module("omni_runtime.stages.worker"),
                *common,
                *("--stage", stage.name, "--replica", REPLICA_PLACEHOLDER),
                *("--entry-host", LOOPBACK, "--entry-port", str(ports.control)),
                *("--ipc-dir", str(folders.private), "--http-port", str(port), "--models-dir", str(folders.models)),
            )
            name = stage.name if counts[stage.name] == 1 else f"{stage.name}-{index}"
            url = f"http://{LOOPBACK}:{port}/ready"
            yield ProcessSpec(name, command, url, float(stage.startup_timeout_seconds), order=1, stage=stage.name)


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)
