"""A plan as processes: command lines are those of the pods."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from omni_runtime.connectors.sidecar import _parse as parse_sidecar
from omni_runtime.deploy.plan import ReplicaBounds
from omni_runtime.entry import parse_arguments as parse_entry
from omni_runtime.local.layout import LocalFolders, ProcessSpec, choose_ports, plan_processes, replica_counts
from omni_runtime.stages.worker import _parse as parse_worker
from tests.unit.orchestrator.plans import a_plan

FOLDERS = LocalFolders(Path("/tmp/private"), Path("/dev/shm"), Path("/models"))


def processes(**counts: int) -> dict[str, ProcessSpec]:
    plan = a_plan()
    wanted = replica_counts(plan, counts)
    specs = plan_processes(plan, wanted, FOLDERS, choose_ports(8000, sum(wanted.values())), "127.0.0.1")
    return {s.name: s for s in specs}


def test_every_command_line_is_understood_by_its_process() -> None:
    specs = processes(talker=2)
    assert list(specs) == ["connector", "entry", "thinker", "talker-0", "talker-1", "code2wav"]
    entry = parse_entry(list(specs["entry"].command[3:]))
    sidecar = parse_sidecar(list(specs["connector"].command[3:]))
    workers = [parse_worker(list(s.command[3:])) for s in specs.values() if s.stage]
    assert {w.entry_port for w in workers} == {entry.control_port}
    assert {w.ipc_dir for w in workers} == {sidecar.ipc_dir}
    assert sidecar.arena_bytes == 3 * (64 << 20)
    assert len({w.http_port for w in workers} | {sidecar.http_port, sidecar.data_port, entry.control_port}) == 7


def test_entry_stops_first_and_connector_last() -> None:
    order = {s.name: s.order for s in processes().values()}
    assert order["entry"] < order["thinker"] == order["code2wav"] < order["connector"]


@pytest.mark.parametrize(
    ("bounds", "count"),
    [
        pytest.param(ReplicaBounds(3, 1, 3), 3, id="fixed"),
        pytest.param(ReplicaBounds(None, 2, 8), 2, id="minimum of a range"),
        pytest.param(ReplicaBounds(None, 0, 8), 1, id="scaled to zero still runs here"),
    ],
)
def test_replica_counts(bounds: ReplicaBounds, count: int) -> None:
    plan = a_plan()
    plan = msgspec.structs.replace(plan, replicas={**plan.replicas, "talker": bounds})
    assert replica_counts(plan, {})["talker"] == count
    assert replica_counts(plan, {"talker": 5})["talker"] == 5
