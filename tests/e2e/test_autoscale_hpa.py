"""A HorizontalPodAutoscaler of Kubernetes on an OmniStage, through /scale: it reads the count and writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from omni_runtime.cli.kubectl import SYSTEM_NAMESPACE, Kube, port_forward, wait_ready
from tests.e2e import metrics_adapter
from tests.e2e.conftest import conditions, eventually
from tests.e2e.null_pods import Clients, NullPods, apply, deleted_afterwards, null_pods, script

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

ADAPTER = "metrics-adapter"
API_SERVICE = "v1beta1.external.metrics.k8s.io"


@pytest.fixture(scope="module")
def site(kube: Kube) -> Iterator[NullPods]:
    with null_pods(kube) as found:
        yield found


def certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) in PEM, for whoever does not check them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ADAPTER)])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    signed = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
    cert, secret = folder / "tls.crt", folder / "tls.key"
    cert.write_bytes(signed.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(pem, kind, serialization.NoEncryption()))
    return cert, secret


@contextmanager
def adapter(site: NullPods, pipeline: str, folder: Path) -> Iterator[None]:
    """The metrics of one pipeline as external.metrics.k8s.io."""
    kube, here = site.kube, ("-n", site.namespace)
    cert, key = certificate(folder)
    kube.read(*here, "create", "secret", "tls", ADAPTER, f"--cert={cert}", f"--key={key}")
    kube.read(*here, "create", "configmap", ADAPTER, f"--from-file=adapter.py={metrics_adapter.__file__}")
    operator = kube.get("-n", SYSTEM_NAMESPACE, "deployment", "omni-operator")["spec"]["template"]["spec"]
    container = {
        "name": "adapter",
        "image": operator["containers"][0]["image"],
        "imagePullPolicy": operator["containers"][0]["imagePullPolicy"],
        "command": ["python", "/code/adapter.py", "/tls/tls.crt", "/tls/tls.key"],
        "args": [f"http://{pipeline}.{site.namespace}.svc"],
        "readinessProbe": {"tcpSocket": {"port": metrics_adapter.PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "code", "mountPath": "/code"}, {"name": "tls", "mountPath": "/tls"}],
    }
    volumes = [{"name": "code", "configMap": {"name": ADAPTER}}, {"name": "tls", "secret": {"secretName": ADAPTER}}]
    # As process 1 it does not hear SIGTERM.
    pod = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
    meta: dict[str, Any] = {"name": ADAPTER, "namespace": site.namespace, "labels": {"app": ADAPTER}}
    ports = [{"port": 443, "targetPort": metrics_adapter.PORT}]
    apply(
        kube,
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod},
    )
    apply(
        kube,
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": meta["labels"], "ports": ports}},
    )
    kube.read(*here, "wait", f"pod/{ADAPTER}", "--for=condition=Ready", "--timeout=120s")
    spec = {
        "group": "external.metrics.k8s.io",
        "version": "v1beta1",
        "insecureSkipTLSVerify": True,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": {"name": ADAPTER, "namespace": site.namespace, "port": 443},
    }
    service = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API_SERVICE}}
    # A namespace is deleted when it has no pods; only those of pipelines are waited for there.
    with deleted_afterwards(kube, *here, "pod", ADAPTER), deleted_afterwards(kube, "apiservice", API_SERVICE):
        apply(kube, {**service, "spec": spec})
        kube.read("wait", f"apiservice/{API_SERVICE}", "--for=condition=Available", "--timeout=120s")
        yield


def an_hpa(site: NullPods, stage: str) -> dict[str, Any]:
    """Two requests per replica. Its own default waits five minutes before it shrinks."""
    target = {"type": "AverageValue", "averageValue": "2"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": stage, "namespace": site.namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "serving.omni.dev/v1alpha1", "kind": "OmniStage", "name": stage},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [
                {"type": "External", "external": {"metric": {"name": metrics_adapter.METRIC}, "target": target}}
            ],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 15}},
        },
    }


def test_an_hpa_owns_a_stage_in_mode_external(site: NullPods, tmp_path: Path) -> None:
    """T12, T16: it finds the pods by the selector of /scale, its count stands, and it shrinks the stage again."""
    name, stage = "hpa", "hpa-talker"
    site.make(name, {"talker": {"scaling": {"minReplicas": 1, "maxReplicas": 4, "mode": "External"}}})
    wait_ready(lambda: site.pipeline(name), 300)

    def scaler() -> dict[str, Any]:
        return site.kube.get("-n", site.namespace, "hpa", stage)

    with adapter(site, name, tmp_path), port_forward(site.kube, site.namespace, name) as url:
        apply(site.kube, an_hpa(site, stage))
        with Clients(url, 1.0, script(20, 400)) as clients:  # eight at once
            eventually(lambda: site.replicas(name)["talker"] == 4 or None, 240, "four talkers")
            eventually(lambda: len(site.pods(name, "talker")) == 4 or None, 60, "their pods")
            said = {c["type"]: c["status"] for c in scaler()["status"]["conditions"]}
            assert said["AbleToScale"] == said["ScalingActive"] == "True", scaler()["status"]
            eventually(
                lambda: scaler()["status"].get("currentReplicas") == 4 or None, 90, "it sees four through /scale"
            )
            managers = {
                entry["manager"]
                for entry in site.kube.get("-n", site.namespace, "omnistage", stage, "--show-managed-fields")[
                    "metadata"
                ]["managedFields"]
                if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
            }
            assert "kube-controller-manager" in managers
        assert not clients.errors
        eventually(lambda: site.replicas(name)["talker"] == 1 or None, 240, "one talker without load")
    assert conditions(site.pipeline(name))["ScalingReady"]["reason"] == "Manual"
