"""`python -m omni_operator.install_crds`: applies the CRDs that this version was built with. `helm upgrade` runs it first.

Helm installs CRDs once and never updates them, and an operator that is newer than its CRDs loses the fields that the
API server prunes (T58). Only this program may write CRDs; the operator itself reads them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from omni_crds.crd import build_crds
from omni_crds.version import SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION
from omni_operator.logs import info, setup_logging

FIELD_MANAGER = "omni-crds"
ESTABLISHED_SECONDS = 60.0

Crd = dict[str, Any]


class CrdApi(Protocol):
    """What is needed of the API server."""

    def get(self, name: str) -> Crd | None:
        """The installed CRD, or None."""

    def apply(self, crd: Crd) -> None: ...


class NotEstablished(Exception):
    """The API server does not serve a kind."""


def install(
    api: CrdApi,
    crds: Iterable[Crd],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Apply what is not newer already, then wait until every kind is served.

    Raises NotEstablished when a kind is not served within ESTABLISHED_SECONDS.
    """
    wanted = list(crds)
    for crd in wanted:
        name = crd["metadata"]["name"]
        version = schema_version(api.get(name))
        if version is not None and version > SCHEMA_VERSION:
            # A rollback of the operator: taking fields away would prune them from every stored object.
            info("crd_kept", crd=name, installed=version, ours=SCHEMA_VERSION)
            continue
        api.apply(crd)
        info("crd_applied", crd=name, before=version, now=SCHEMA_VERSION)
    deadline = clock() + ESTABLISHED_SECONDS
    for crd in wanted:
        name = crd["metadata"]["name"]
        while not is_established(api.get(name)):
            if clock() >= deadline:
                raise NotEstablished(f"{name} was applied, but is not served after {ESTABLISHED_SECONDS:.0f} s")
            sleep(0.2)


def schema_version(crd: Crd | None) -> int | None:
    """Version of the installed schema; None where there is none or it does not say."""
    annotations = ((crd or {}).get("metadata") or {}).get("annotations") or {}
    text = annotations.get(SCHEMA_VERSION_ANNOTATION, "")
    return int(text) if text.isdecimal() else None


def is_established(crd: Crd | None) -> bool:
    conditions = ((crd or {}).get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Established" and c.get("status") == "True" for c in conditions)


class KubernetesCrds:
    """CrdApi on a cluster: in a pod with its service account, elsewhere with a kubeconfig."""

    def __init__(self, kubeconfig: Path | None = None) -> None:
        from kubernetes import client, config, dynamic

        configuration = client.Configuration()
        if kubeconfig is None:
            config.load_config(client_configuration=configuration)
        else:
            config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self._errors = dynamic.exceptions
        cluster = dynamic.DynamicClient(client.ApiClient(configuration))
        self._crds = cluster.resources.get(api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition")

    def get(self, name: str) -> Crd | None:
        try:
            found: Crd = self._crds.get(name=name).to_dict()
        except self._errors.NotFoundError:
            return None
        return found

    def apply(self, crd: Crd) -> None:
        # By force: Helm installed the first version and stays listed as the manager of its fields.
        self._crds.server_side_apply(
            body=crd, name=crd["metadata"]["name"], field_manager=FIELD_MANAGER, force_conflicts=True
        )


def main() -> int:
    setup_logging()
    install(KubernetesCrds(), build_crds())
    return 0


if __name__ == "__main__":
    sys.exit(main())
