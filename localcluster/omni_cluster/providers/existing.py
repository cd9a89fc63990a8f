"""The cluster of the current kubeconfig. It is used, never changed, and `down` only forgets it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from omni_cluster.build import ensure_client_tools
from omni_cluster.errors import ClusterError, InvalidArgument
from omni_cluster.paths import cluster_dir, clusters_dir
from omni_cluster.processes import write_atomically
from omni_cluster.providers.base import Availability, ComponentStatus, UpRequest
from omni_cluster.providers.kind_tool import load_into_kind
from omni_cluster.state import ClusterState, ProviderName, save_state

_TIMEOUT_SECONDS = 3


def kubeconfig_path() -> Path | None:
    """The file that kubectl would read first: of $KUBECONFIG the first that exists, else ~/.kube/config."""
    variable = os.environ.get("KUBECONFIG")
    candidates = [Path(part) for part in variable.split(os.pathsep) if part] if variable else []
    for path in candidates or [Path.home() / ".kube" / "config"]:
        if path.is_file():
            return path.absolute()
    return None


def minify(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Only the current context, with file names made absolute: later changes of context do not move the cluster.

    Raises KeyError or StopIteration when the current context does not exist.
    """
    wanted = config["current-context"]
    context = next(item for item in config["contexts"] if item["name"] == wanted)
    cluster = next(item for item in config["clusters"] if item["name"] == context["context"]["cluster"])
    user = next((item for item in config.get("users") or [] if item["name"] == context["context"].get("user")), None)

    def absolute(values: dict[str, Any]) -> dict[str, Any]:
        files = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
        return {key: str(folder / value) if key in files else value for key, value in values.items()}

    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": wanted,
        "contexts": [context],
        "clusters": [{**cluster, "cluster": absolute(cluster["cluster"])}],
        "users": [{**user, "user": absolute(user.get("user") or {})}] if user else [],
    }


def server_version(path: Path) -> str:
    """Version of the API server that a kubeconfig leads to. Raises any error of the client library."""
    from kubernetes import client, config

    loader: Any = config  # the client library is partly typed
    api = loader.new_client_from_config(str(path))
    try:
        return str(client.VersionApi(api).get_code(_request_timeout=(_TIMEOUT_SECONDS, _TIMEOUT_SECONDS)).git_version)
    finally:
        api.close()


def first_line(error: Exception) -> str:
    """An error of the client library in one short line; some have no text at all."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__


class ExistingProvider:
    """Uses what `kubectl` would talk to."""

    def availability(self) -> Availability:
        path = kubeconfig_path()
        if path is None:
            return Availability(False, "no kubeconfig")
        if path.is_relative_to(clusters_dir()):
            return Availability(False, f"{path} belongs to a cluster of this tool")
        try:
            version = server_version(path)
            context = yaml.safe_load(path.read_text())["current-context"]
        except Exception as error:  # noqa: BLE001 - the client library raises anything; all of it means "not usable"
            return Availability(False, f"{path} does not answer ({first_line(error)})")
        return Availability(True, f"context {context!r} of {path} answers (Kubernetes {version})")

    def up(self, request: UpRequest, old: ClusterState | None, reason: str) -> ClusterState:
        if request.control_plane_only or request.kwok_nodes or (request.nodes or 1) > 1:
            raise InvalidArgument(
                "--provider", "existing", "cannot add nodes or run a control plane only", "use --provider local"
            )
        target = cluster_dir(request.name) / "kubeconfig"
        if old is None:
            path = kubeconfig_path()
            if path is None:
                raise ClusterError("provider existing: there is no kubeconfig; set KUBECONFIG")
            try:
                config = minify(yaml.safe_load(path.read_text()), path.parent)
            except (KeyError, StopIteration, TypeError, yaml.YAMLError) as error:
                raise ClusterError(f"{path} has no usable current context ({error!r})") from error
            write_atomically(target, yaml.safe_dump(config, sort_keys=False))
        try:
            version = server_version(target)
        except Exception as error:
            raise ClusterError(f"the cluster of {target} does not answer: {error}") from error
        ensure_client_tools()
        why = reason if version in reason else f"{reason}, Kubernetes {version}"
        state = old or ClusterState(request.name, ProviderName.EXISTING, str(target), why)
        save_state(state)
        return state

    def down(self, state: ClusterState) -> None:
        """Nothing: we did not make it. The caller removes our copy of the kubeconfig."""

    def status(self, state: ClusterState) -> tuple[ComponentStatus, ...]:
        try:
            server_version(Path(state.kubeconfig))
        except Exception as error:  # noqa: BLE001 - as above
            return (ComponentStatus("API server", first_line(error)),)
        return (ComponentStatus("API server", None),)

    def load(self, state: ClusterState, image: str, name_as: str | None) -> None:
        context = str(yaml.safe_load(Path(state.kubeconfig).read_text())["current-context"])
        if context.startswith("kind-"):
            load_into_kind(context.removeprefix("kind-"), state, image, name_as)
            return
        raise ClusterError(
            f"cannot put {image} into the nodes of a cluster that is not ours: push it to a registry that the "
            "cluster can pull from, and set that name in the chart's values"
        )
