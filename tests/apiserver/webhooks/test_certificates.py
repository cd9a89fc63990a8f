"""Certificates that somebody else makes, through the API server: a person's own, and cert-manager's objects.

Every answer is a rule's: a call that fails because a certificate is not trusted would say so, and fail the test (T54).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omni_webhooks.certs import keys
from tests.apiserver.conftest import _established
from tests.apiserver.kube import Kube, Refused
from tests.apiserver.webhooks.fake_cert_manager import FakeCertManager, crds
from tests.apiserver.webhooks.harness import KINDS, Installed, WebhookProcess, wait_ready, webhook_process
from tests.apiserver.webhooks.test_process import until, wrong
from tests.unit.chart.render import of_kind, rendered

pytestmark = pytest.mark.timeout(400)
DAY = timedelta(days=1)
SYSTEM = "omni-system"


@contextmanager
def mounted(installed: Installed, kubeconfig: Path, folder: Path) -> Iterator[WebhookProcess]:
    """A replica that serves what is in the folder, behind the configuration."""
    options = ("--certificate-dir", str(folder), "--ignore-nodes")
    with webhook_process(kubeconfig, folder.parent / "log", *options) as process:
        try:
            installed.apply(process.port)
            yield process
        finally:
            installed.remove()


def answers(kube: Kube, namespace: str) -> None:
    """The webhook was called, and a rule refused."""
    with pytest.raises(Refused, match="nonsense") as caught:
        kube.create(wrong(namespace), dry_run=True)
    assert "[InvalidSpec]" in str(caught.value.causes), caught.value


def loads(process: WebhookProcess, count: int) -> None:
    until(lambda: seen(process, "certificate.loaded") >= count, f"{count} were loaded")


def seen(process: WebhookProcess, event: str) -> int:
    return sum(e["event"] == event for e in process.events())


def test_a_persons_own_certificate_and_authority_are_exchanged_while_calls_go_on(
    kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str
) -> None:
    folder, now = tmp_path / "tls", datetime.now(UTC)
    folder.mkdir()
    old, new = (keys.make_authority(now, DAY) for _ in range(2))

    def write(authority: keys.Pair) -> None:
        pair = keys.issue(authority, ["127.0.0.1"], now, DAY)
        (folder / "tls.key").write_bytes(pair.key)
        (folder / "tls.crt").write_bytes(pair.cert)

    def values(*authorities: keys.Pair) -> tuple[str, ...]:
        bundle = base64.b64encode(b"".join(a.cert for a in authorities)).decode()
        given = {"mode": "Provided", "secretName": "mine", "caBundle": bundle}
        return tuple(f"--set=webhooks.certificates.{name}={value}" for name, value in given.items())

    installed = Installed(kube, values=values(old))
    with mounted(installed, kubeconfig, folder) as process:
        until(lambda: "tls.crt" in process.get("/readyz")[1], "says what is missing")
        write(old)
        wait_ready(process)
        until(lambda: _settled(kube, namespace), "the API server has taken the configuration up")
        looks = seen(process, "certificates.unreadable")
        (folder / "tls.crt").write_bytes(b"half a fil")
        until(lambda: seen(process, "certificates.unreadable") > looks, "it was looked at")
        assert process.ready(), "what is in use stays in use"
        answers(kube, namespace)
        write(old)
        loads(process, 2)
        answers(kube, namespace)
        # Another authority: first both are trusted, then it signs, then it alone is trusted.
        for trusted, signing, count in ((values(old, new), old, 3), (values(old, new), new, 4), (values(new), new, 5)):
            installed.values = trusted
            installed.apply(process.port)
            until(lambda: _trusts(installed, trusted), "the configurations say so")  # noqa: B023
            write(signing)
            loads(process, count)
            until(lambda: _settled(kube, namespace), "the API server has taken the configuration up")
            answers(kube, namespace)
        process.terminate()
        until(lambda: process.get("/readyz") == (503, "stopping"), "says at once that it is going")
        assert process.process.wait(30) == 0
    assert "Traceback" not in process.log.read_text()


def _trusts(installed: Installed, values: tuple[str, ...]) -> bool:
    bundle = values[-1].partition("caBundle=")[2]
    return all(w["clientConfig"]["caBundle"] == bundle for kind in KINDS for w in installed.get(kind)["webhooks"])


def _settled(kube: Kube, namespace: str) -> bool:
    """The API server hears of a configuration through a watch of its own."""
    try:
        answers(kube, namespace)
    except (AssertionError, pytest.fail.Exception):
        return False
    return True


def test_what_the_chart_asks_of_cert_manager_is_what_cert_manager_takes(
    kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str
) -> None:
    """Stored behind cert-manager's own CRDs with nothing unknown; a fake fills the Secrets and injects the authority.

    A renewal leaves the authority as it is: the API server needs to hear of nothing.
    """
    values = ("--set", "webhooks.certificates.mode=CertManager")
    folder = tmp_path / "tls"
    folder.mkdir()
    system = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}}
    objects = [*of_kind(rendered(*values), "Issuer"), *of_kind(rendered(*values), "Certificate")]
    authority, serving = of_kind(rendered(*values), "Certificate")
    secrets = [c["spec"]["secretName"] for c in (authority, serving)]
    manager, installed = FakeCertManager(kube, SYSTEM), Installed(kube, values=values)
    kube.apply(system)
    definitions = crds()
    try:
        for definition in definitions:
            _established(kube, kube.apply(definition))
        # The check below would be none if these CRDs let everything pass.
        odd = {**serving, "spec": {**serving["spec"], "privateKey": {"algorithm": "ECDSA", "bits": 256}}}
        with pytest.raises(Refused, match="bits"):
            kube.apply(odd)
        for body in objects:
            assert kube.apply(body, manager="helm")["spec"] == body["spec"], "nothing is unknown, nothing is dropped"
        manager.issue(authority)
        manager.issue(serving)
        manager.mount(secrets[1], folder)
        with mounted(installed, kubeconfig, folder) as process:
            for kind in KINDS:
                manager.inject(installed, kind)
            wait_ready(process)
            until(lambda: _settled(kube, namespace), "the API server has taken the configuration up")
            before = installed.get()
            manager.issue(serving)
            answers(kube, namespace)  # renewed, and not yet in the pod
            manager.mount(secrets[1], folder)
            loads(process, 2)
            answers(kube, namespace)
            manager.inject(installed, KINDS[0])
            assert installed.get()["webhooks"] == before["webhooks"]
    finally:
        bodies = [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": s, "namespace": SYSTEM}} for s in secrets]
        manager.remove(*bodies, *objects, *definitions)
