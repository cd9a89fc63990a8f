"""What is remembered of a cluster between commands: one JSON file in its folder, and one lock beside it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from omni_cluster.errors import ClusterError, NoSuchCluster
from omni_cluster.paths import cache_dir, cluster_dir, clusters_dir
from omni_cluster.processes import write_atomically
from omni_cluster.progress import step

UNKNOWN_INDEX = -1
"""Index of a cluster whose state file was lost."""


class ProviderName(StrEnum):
    """Where a cluster comes from."""

    EXISTING = "existing"
    KIND = "kind"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One cluster. Written before anything is started, so that a crash half-way can always be cleaned up."""

    name: str
    provider: ProviderName
    kubeconfig: str
    reason: str = ""
    index: int = 0
    nodes: int = 1
    control_plane_only: bool = False
    kwok_nodes: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        return cluster_dir(self.name)


def load_state(name: str) -> ClusterState:
    """State of a cluster. Raises NoSuchCluster, or ClusterError for a file that this version cannot read."""
    path = cluster_dir(name) / "cluster.json"
    try:
        raw = json.loads(path.read_text())
        known = {field.name for field in dataclasses.fields(ClusterState)}
        values = {key: value for key, value in raw.items() if key in known}
        values["provider"] = ProviderName(values["provider"])
        values["kwok_nodes"] = tuple(values.get("kwok_nodes", ()))
        return ClusterState(**values)
    except FileNotFoundError:
        raise NoSuchCluster(name) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{path} cannot be read ({error}); `omni cluster down --name {name}` removes it") from error


def find_state(name: str) -> ClusterState | None:
    """State of a cluster, or None when there is none."""
    try:
        return load_state(name)
    except NoSuchCluster:
        return None


def all_states() -> tuple[ClusterState, ...]:
    """Every cluster with readable state, by name."""
    found = []
    for path in sorted(clusters_dir().glob("*/cluster.json")):
        try:
            found.append(load_state(path.parent.name))
        except ClusterError:
            continue
    return tuple(found)


def save_state(state: ClusterState) -> None:
    """Replace the state file in one step."""
    write_atomically(state.root / "cluster.json", json.dumps(dataclasses.asdict(state), indent=2) + "\n")


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """One `up`, `down` or `load` of a cluster at a time. The kernel drops the lock when its holder dies."""
    cluster_dir(name)  # refuses what is no name
    with _locked(f"cluster-{name}", f"wait for another command on cluster {name!r}"):
        yield


@contextmanager
def machine_lock() -> Iterator[None]:
    """One change of what all clusters share (address ranges, host settings) at a time. Held for moments only."""
    with _locked("machine", "wait for another cluster's command"):
        yield


@contextmanager
def _locked(name: str, waiting: str) -> Iterator[None]:
    path = cache_dir() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(waiting):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
