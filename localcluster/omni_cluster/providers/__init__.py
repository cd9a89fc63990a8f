"""Chooses where a cluster comes from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from omni_cluster.errors import ClusterError, InvalidArgument, MissingPrerequisite
from omni_cluster.paths import cluster_dir
from omni_cluster.progress import say
from omni_cluster.providers.base import Availability, Provider, UpRequest
from omni_cluster.providers.existing import ExistingProvider
from omni_cluster.providers.kind import KindProvider
from omni_cluster.providers.local import LocalProvider
from omni_cluster.state import UNKNOWN_INDEX, ClusterState, ProviderName, find_state

_PROVIDERS: Mapping[ProviderName, Callable[[], Provider]] = {
    ProviderName.EXISTING: ExistingProvider,
    ProviderName.KIND: KindProvider,
    ProviderName.LOCAL: LocalProvider,
}


def of(state: ClusterState) -> Provider:
    """The provider that made this cluster."""
    return _PROVIDERS[state.provider]()


def up(request: UpRequest, wanted: str) -> ClusterState:
    """Bring a cluster up with the provider that was asked for, or with the first that works here."""
    old = find_state(request.name)
    name, reason = choose(wanted, request, old, lambda candidate: _PROVIDERS[candidate]().availability())
    say(f"provider {name}: {reason}")
    return _PROVIDERS[name]().up(request, old, reason)


def down(name: str) -> None:
    """Remove a cluster; fine when there is none, and also when its state file was lost."""
    root = cluster_dir(name)
    try:
        state = find_state(name)
    except ClusterError as error:
        say(str(error))
        state = None
    if state is None and not root.exists():
        say(f"there is no cluster {name!r}")
        return
    if state is None:
        nodes = len(list((root / "nodes").glob("n*")))
        state = ClusterState(name, ProviderName.LOCAL, str(root / "kubeconfig"), index=UNKNOWN_INDEX, nodes=nodes)
    of(state).down(state)
    shutil.rmtree(root, ignore_errors=True)


def choose(
    wanted: str, request: UpRequest, old: ClusterState | None, look: Callable[[ProviderName], Availability]
) -> tuple[ProviderName, str]:
    """Which provider and why. A cluster keeps its provider; `auto` takes the first usable one.

    Raises InvalidArgument for an unknown or contradicting provider, MissingPrerequisite when none works.
    """
    if wanted != "auto" and wanted not in [str(name) for name in ProviderName]:
        raise InvalidArgument("--provider", wanted, "is unknown", "use auto, existing, kind or local")
    if old is not None:
        if wanted not in ("auto", old.provider):
            raise InvalidArgument(
                "--provider", wanted, f"but cluster {old.name!r} comes from {old.provider}",
                f"use another --name, or first `omni cluster down --name {old.name}`",
            )  # fmt: skip
        return old.provider, old.reason
    if wanted != "auto":
        return ProviderName(wanted), "asked for"
    if request.control_plane_only:
        return ProviderName.LOCAL, "a control plane without nodes is always our own"
    refused: list[str] = []
    for name in ProviderName:
        found = look(name)
        if found.usable:
            return name, "; ".join([found.reason, *refused])
        refused.append(f"{name} not used: {found.reason}")
    raise MissingPrerequisite("no provider works here:\n  " + "\n  ".join(refused))
