"""What every provider does. A provider keeps nothing in memory: state is in the cluster's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from omni_cluster.state import ClusterState


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What the user asked for; None means: as it is, or the default for a new cluster."""

    name: str
    nodes: int | None = None
    control_plane_only: bool = False
    kwok_nodes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """One line of `omni cluster status`; healthy when there is no problem."""

    component: str
    problem: str | None
    pid: int | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a provider can be used here and why (not)."""

    usable: bool
    reason: str


class Provider(Protocol):
    """Brings clusters of one kind up and down. Every method may raise ClusterError."""

    def availability(self) -> Availability:
        """A quick look (a few seconds at most) whether this provider would work on this machine."""

    def up(self, request: UpRequest, old: ClusterState | None, reason: str) -> ClusterState:
        """Make the cluster as requested; idempotent, and repairs what a crash left."""

    def down(self, state: ClusterState) -> None:
        """Remove everything that `up` made."""

    def status(self, state: ClusterState) -> tuple[ComponentStatus, ...]:
        """Health of every component, in start order."""

    def load(self, state: ClusterState, image: str, name_as: str | None) -> None:
        """Make an image available on every node."""
