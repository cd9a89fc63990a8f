"""The whole process: its ServiceAccount's rights, certificates, readiness, signals, exemptions, and what it sees."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_webhooks.certs import keys
from omni_webhooks.certs.rotation import ROTATE_ANNOTATION
from omni_webhooks.certs.state import decode
from tests.apiserver.kube import Kube, Object, Refused
from tests.apiserver.webhooks.harness import (
    KINDS,
    Installed,
    WebhookProcess,
    create_as_operator,
    installed_webhooks,
    wait_ready,
    webhook_process,
)
from tests.unit.chart.render import rendered

pytestmark = pytest.mark.timeout(400)
NAME, SYSTEM = "omni-operator-webhooks", "omni-system"
# How long an API server may take to hear of a new authority, and a replica of a new certificate: loaded machines, too.
ROTATION = ("--settle-seconds", "5", "--retire-seconds", "4")


def pipeline(namespace: str, name: str = "p", **spec: Any) -> Object:
    return {
        "apiVersion": "serving.omni.dev/v1alpha1",
        "kind": "OmniPipeline",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "packaged://smol-omni"}, "topology": "smol_omni", **spec},
    }


def wrong(namespace: str, name: str = "p") -> Object:
    return pipeline(namespace, name, topology="nonsense")


def profile(name: str = "webhook-test", **spec: Any) -> Object:
    return {
        "apiVersion": "serving.omni.dev/v1alpha1",
        "kind": "OmniRuntimeProfile",
        "metadata": {"name": name},
        "spec": {
            "vendor": "cpu",
            "images": {"runtime": "localhost/omni:test"},
            "deviceClasses": [{"name": "cpu", "memory": "64Gi"}],
            **spec,
        },
    }


def until(check: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s"
        time.sleep(0.05)
    return found


@contextmanager
def removed(kube: Kube, body: Object) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            kube.delete(body)
        except Refused as error:
            if error.status != 404:
                raise


@pytest.fixture(scope="module")
def running(kube: Kube, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebhookProcess]:
    log = tmp_path_factory.mktemp("process") / "log"
    with installed_webhooks(kube, kubeconfig, log, "--ignore-nodes") as process:
        yield process


class TestAnswers:
    def test_a_refusal_reads_like_one_of_the_api_server(
        self, kube: Kube, kubectl: Callable[..., str], running: WebhookProcess, namespace: str
    ) -> None:
        with pytest.raises(AssertionError) as caught:
            kubectl("apply", "-f", "-", stdin=yaml.safe_dump(wrong(namespace)))
        said = str(caught.value)
        assert 'The OmniPipeline "p" is invalid: spec.topology: ' in said
        assert "'nonsense'" in said
        assert "[InvalidSpec]" in said

    def test_a_name_that_is_generated_later(self, kube: Kube, running: WebhookProcess, namespace: str) -> None:
        body = pipeline(namespace)
        body["metadata"] = {"generateName": "p-", "namespace": namespace}
        stored = kube.create(body)
        assert stored["metadata"]["name"].startswith("p-")

    def test_an_object_that_is_being_deleted_always_passes(
        self, kube: Kube, running: WebhookProcess, namespace: str
    ) -> None:
        """T52: a finalizer can be taken off whatever the spec says, and whatever else the write changes."""
        body = wrong(namespace)
        body["metadata"]["finalizers"] = ["example.com/hold"]
        stored = create_as_operator(kube, body)
        kube.delete(stored)
        deleting = kube.get(stored)
        assert deleting["metadata"]["deletionTimestamp"]
        deleting["metadata"]["finalizers"] = []
        kube.replace(deleting)
        with pytest.raises(Refused) as gone:
            kube.get(stored)
        assert gone.value.status == 404

    def test_labels_of_an_invalid_object_can_be_edited(
        self, kube: Kube, running: WebhookProcess, namespace: str
    ) -> None:
        stored = create_as_operator(kube, wrong(namespace))
        stored["metadata"]["labels"] = {"team": "voice"}
        assert kube.replace(stored)["metadata"]["labels"] == {"team": "voice"}

    def test_status_is_nobodys_business(self, kube: Kube, running: WebhookProcess, namespace: str) -> None:
        stored = create_as_operator(kube, wrong(namespace))
        before = running.metric("omni_webhooks_admissions_total")
        kube.replace({**stored, "status": {"stagesReady": "0/3"}}, subresource="status")
        assert running.metric("omni_webhooks_admissions_total") == before

    def test_kube_system_is_never_asked_about(self, kube: Kube, running: WebhookProcess) -> None:
        body = wrong("kube-system")
        with removed(kube, body):
            assert kube.create(body)

    def test_a_profile_and_a_pipeline_that_are_applied_together(
        self, kube: Kube, running: WebhookProcess, namespace: str
    ) -> None:
        """The watch may lag behind the profile by some milliseconds: before a refusal it is read again."""
        spec = {"runtimeProfile": "webhook-test", "stages": [{"name": "thinker", "accelerator": {"class": "new"}}]}
        body = profile()
        with removed(kube, body):
            kube.apply(body)
            with pytest.raises(Refused, match="has no such device class"):
                kube.create(pipeline(namespace, **spec))
            for i in range(5):
                classes = [{"name": "cpu", "memory": "64Gi"}, {"name": "new", "memory": f"{i + 1}Gi"}]
                kube.apply(profile(deviceClasses=classes))
                kube.create(pipeline(namespace, f"p{i}", **spec))
                kube.apply(profile(deviceClasses=classes[:1]))

    def test_scale(self, kube: Kube, running: WebhookProcess, namespace: str) -> None:
        """`kubectl scale` and autoscalers write a Scale: the same bounds hold."""
        stage = {
            "apiVersion": "serving.omni.dev/v1alpha1",
            "kind": "OmniStage",
            "metadata": {"name": "p-talker", "namespace": namespace},
            "spec": {
                "pipelineRef": {"name": "p"}, "stageName": "talker", "replicas": 1, "minReplicas": 1, "maxReplicas": 3,
            },
        }  # fmt: skip
        kube.create(stage)
        path = kube.path(stage, name="p-talker", subresource="scale")
        kube.request("PATCH", path, {"spec": {"replicas": 3}}, content_type="application/merge-patch+json")
        with pytest.raises(Refused, match="more than scaling.maxReplicas 3"):
            kube.request("PATCH", path, {"spec": {"replicas": 4}}, content_type="application/merge-patch+json")
        assert kube.get(stage)["spec"]["replicas"] == 3

    def test_defaults_are_written_and_no_count_is(self, kube: Kube, running: WebhookProcess) -> None:
        body = profile()
        with removed(kube, body):
            stored = kube.create(body)
            assert stored["spec"]["defaultDeviceClass"] == "cpu"
            renamed = {**stored["spec"], "deviceClasses": [{"name": "cpu2", "memory": "64Gi"}]}
            assert kube.replace({**stored, "spec": renamed})["spec"]["defaultDeviceClass"] == "cpu2"

    def test_metrics(self, running: WebhookProcess) -> None:
        status, text = running.get("/metrics")
        assert status == 200
        for line in (
            'omni_webhooks_admissions_total{kind="OmniPipeline",rule="InvalidSpec",verdict="refused"}',
            'omni_webhooks_admission_seconds_bucket{kind="OmniPipeline"',
            'omni_webhooks_cache_age_seconds{resource="omnipipelines"}',
            "omni_webhooks_certificate_expires_timestamp_seconds",
            "process_resident_memory_bytes",
        ):
            assert line in text, line


class TestCertificates:
    def test_the_authority_is_kept_up_not_only_filled_in(
        self, kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str
    ) -> None:
        """T21, T54: emptied or replaced by a Git tool, a deleted Secret, a configuration that was made anew."""
        installed = Installed(kube)
        with webhook_process(kubeconfig, tmp_path / "log", *installed.options(), "--ignore-nodes") as process:
            try:
                assert not process.ready(), "no configuration yet: nobody could call"
                installed.apply(process.port)
                wait_ready(process)
                bundle = _bundles(installed)
                assert len(bundle) == 1
                other = keys.make_authority(datetime.now(UTC), timedelta(days=1)).cert
                for spoilt in (None, base64.b64encode(other).decode()):
                    for kind in KINDS:
                        configuration = installed.get(kind)
                        for webhook in configuration["webhooks"]:
                            webhook["clientConfig"]["caBundle"] = spoilt
                            if spoilt is None:
                                del webhook["clientConfig"]["caBundle"]
                        kube.replace(configuration)
                    until(lambda: _bundles(installed) == bundle, "the authority is back")
                secret = kube.get(installed.secret_body())
                kube.delete(installed.secret_body())
                until(lambda: _data(kube, installed) == secret["data"], "the Secret is put back as it was")
                empty = dict.fromkeys(("tls.crt", "tls.key"), "")
                kube.replace({**kube.get(installed.secret_body()), "data": empty})
                until(lambda: _data(kube, installed) == secret["data"], "and filled again")
                for kind in KINDS:
                    kube.delete(installed.get(kind))
                installed.apply(process.port)
                until(lambda: _bundles(installed) == bundle, "a new configuration gets it, too")
                with pytest.raises(Refused, match="InvalidSpec|nonsense"):
                    kube.create(wrong(namespace))
            finally:
                installed.remove()


def test_the_rights_of_the_charts_service_account_are_enough_for_a_rotation_on_request(
    kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str
) -> None:
    """From nothing to ready, and through all three steps, with a token of the ServiceAccount and nothing else."""
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    objects = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}}]
    objects += [o for o in rendered() if o["kind"] in kinds and o["metadata"]["name"].startswith(NAME)]
    installed = Installed(kube, name=NAME)
    for body in objects:
        kube.apply(body, manager="helm")
    own = tmp_path / "kubeconfig"
    own.write_text(yaml.safe_dump(_token_kubeconfig(kube, kubeconfig)))
    options = ("--configuration", NAME, "--secret", f"{NAME}-tls", "--namespace", SYSTEM, *ROTATION)
    try:
        with webhook_process(own, tmp_path / "log", *options) as process:
            installed.apply(process.port)
            wait_ready(process)
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{NAME}-tls", "namespace": SYSTEM}}
            stored = kube.get(secret)
            before = decode(stored["data"])
            assert before is not None
            stored["metadata"]["annotations"] = {ROTATE_ANNOTATION: "now"}
            kube.replace(stored)
            seen = set()

            def rotated() -> bool:
                with pytest.raises(Refused, match="nonsense"):  # and never "failed calling webhook"
                    kube.create(wrong(namespace))
                now = decode(kube.get(secret)["data"])
                assert now is not None
                seen.add((len(now.trusted), now.trusted[0] == before.trusted[0], now.serving == before.serving))
                return len(now.trusted) == 1 and now.trusted != before.trusted

            until(rotated, "only the new authority is trusted", 120)
            assert seen >= {(2, False, True), (2, False, False), (1, False, False)}
            assert ROTATE_ANNOTATION not in (kube.get(secret)["metadata"].get("annotations") or {})
            until(lambda: len(_bundles(installed)) == 1, "both configurations carry it")
            assert not [e for e in process.events() if e["level"] != "info"], process.events()
    finally:
        installed.remove()
        for body in reversed(objects):
            kube.delete(body)


def _token_kubeconfig(kube: Kube, kubeconfig: Path) -> Object:
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{NAME}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = kube.request("POST", path, request)["status"]["token"]
    config: Object = yaml.safe_load(kubeconfig.read_text())
    config["users"] = [{"name": u["name"], "user": {"token": token}} for u in config["users"]]
    return config


def _bundles(installed: Installed) -> set[str | None]:
    return {w["clientConfig"].get("caBundle") for kind in KINDS for w in installed.get(kind)["webhooks"]}


def _data(kube: Kube, installed: Installed) -> dict[str, str]:
    """Empty while the Secret is gone."""
    try:
        data: dict[str, str] = kube.get(installed.secret_body()).get("data") or {}
    except Refused:
        return {}
    return data
