"""A stand-in for cert-manager, called a fake: it reads Certificates and Issuers as they are stored (behind the real CRDs),
fills their Secrets, and injects authorities into annotated webhook configurations. And the kubelet's part: files.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from omni_webhooks.certs.keys import Pair, issue, make_authority
from tests.apiserver.kube import Kube, Object, Refused
from tests.apiserver.webhooks.harness import Installed

CRDS = Path(__file__).parent / "certmanager"
INJECT = "cert-manager.io/inject-ca-from"
DAY = timedelta(days=1)


def crds() -> list[Object]:
    return [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]


@dataclass
class FakeCertManager:
    """hosts: where the API server of a test finds the webhooks, in addition to the names of the Service."""

    kube: Kube
    namespace: str
    hosts: tuple[str, ...] = ("127.0.0.1",)

    def issue(self, certificate: Object) -> None:
        """Fill the Secret of a stored Certificate, anew where it is there already."""
        spec = self.kube.get(certificate)["spec"]
        assert spec["issuerRef"].get("kind", "Issuer") == "Issuer"
        assert spec["privateKey"]["algorithm"] == "ECDSA", "what this fake can sign"
        issuer = self.kube.get(self._body("cert-manager.io/v1", "Issuer", spec["issuerRef"]["name"]))["spec"]
        now = datetime.now(UTC)
        if spec.get("isCA"):
            assert "selfSigned" in issuer
            pair = make_authority(now, DAY)
            authority = pair.cert
        else:
            ca = self.secret(issuer["ca"]["secretName"])
            signing = Pair(_decoded(ca, "tls.crt"), _decoded(ca, "tls.key"))
            pair, authority = issue(signing, [*spec["dnsNames"], *self.hosts], now, DAY), signing.cert
        data = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority}
        secret = {**self._body("v1", "Secret", spec["secretName"]), "type": "kubernetes.io/tls"}
        secret["data"] = {name: base64.b64encode(value).decode() for name, value in data.items()}
        self.kube.apply(secret, manager="cert-manager")

    def inject(self, installed: Installed, kind: str) -> None:
        """As cainjector does: the authority of the annotated Certificate, into every webhook of the configuration."""
        configuration = installed.get(kind)
        namespace, name = configuration["metadata"]["annotations"][INJECT].split("/")
        assert namespace == self.namespace
        spec = self.kube.get(self._body("cert-manager.io/v1", "Certificate", name))["spec"]
        bundle = self.secret(spec["secretName"])["data"]["ca.crt"]
        for webhook in configuration["webhooks"]:
            webhook["clientConfig"]["caBundle"] = bundle
        self.kube.replace(configuration)

    def secret(self, name: str) -> Object:
        return self.kube.get(self._body("v1", "Secret", name))

    def mount(self, secret: str, folder: Path) -> None:
        """What the kubelet writes into a pod's volume."""
        stored = self.secret(secret)
        for name in ("tls.crt", "tls.key"):
            (folder / name).write_bytes(_decoded(stored, name))

    def remove(self, *bodies: Object) -> None:
        for body in bodies:
            try:
                self.kube.delete(body)
            except KeyError:
                pass  # its kind never came to be
            except Refused as error:
                if error.status != 404:
                    raise

    def _body(self, api_version: str, kind: str, name: str) -> Object:
        return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": self.namespace}}


def _decoded(secret: Object, name: str) -> bytes:
    return base64.b64decode(secret["data"][name])
