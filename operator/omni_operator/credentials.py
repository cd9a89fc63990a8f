"""Where the API server is and who we are: the pod's service account, else the kubeconfig. One source for kopf and us."""

from __future__ import annotations

import os
from pathlib import Path

import kopf

from omni_operator.errors import OperatorError

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoCredentials(OperatorError):
    """Neither a service account nor a kubeconfig was found."""


def in_cluster_namespace() -> str | None:
    """The namespace of our own pod, or None outside a cluster."""
    path = SERVICE_ACCOUNT_DIR / "namespace"
    return path.read_text().strip() if path.is_file() else None


def load_credentials(settings: kopf.OperatorSettings | None = None) -> kopf.ConnectionInfo:
    """Read the credentials anew; the kubelet rotates the projected token about every 50 minutes.

    An explicit KUBECONFIG wins over the service account, so that a process in a pod can be pointed elsewhere.
    Raises NoCredentials.
    """
    if not os.environ.get("KUBECONFIG") and (SERVICE_ACCOUNT_DIR / "token").is_file():
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return kopf.ConnectionInfo(
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            ca_path=str(SERVICE_ACCOUNT_DIR / "ca.crt"),
            token=(SERVICE_ACCOUNT_DIR / "token").read_text().strip(),
            default_namespace=in_cluster_namespace(),
        )
    info = kopf.login_with_kubeconfig(settings=settings or kopf.OperatorSettings())
    if info is None:
        raise NoCredentials("no service account is mounted and neither KUBECONFIG nor ~/.kube/config exists")
    return info
