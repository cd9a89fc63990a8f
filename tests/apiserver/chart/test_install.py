"""The rendered chart on a real API server: accepted without a warning, and what RBAC allows is what the code uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_crds.crd import build_crds
from omni_crds.version import SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION
from omni_operator.install_crds import KubernetesCrds, install
from omni_operator.rbac import RULES
from omni_webhooks.rbac import CONFIGURATION_NAME, SECRET_NAME
from omni_webhooks.rbac import RULES as WEBHOOK_RULES
from tests.apiserver.kube import Kube, Object
from tests.unit.chart.render import is_hook, rendered

pytestmark = pytest.mark.timeout(400)  # starts a control plane, and asks it hundreds of questions

NAMESPACE = "omni-system"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:omni-operator"
CRD_HOOK = f"system:serviceaccount:{NAMESPACE}:omni-operator-crds"
WEBHOOKS = f"system:serviceaccount:{NAMESPACE}:omni-operator-webhooks"
WEBHOOK_NAMES = {SECRET_NAME: "omni-operator-webhooks-tls", CONFIGURATION_NAME: "omni-operator-webhooks"}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")

# (API group, resource with its subresource, verb, name of the object or "")
Access = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def system_namespace(kube: Kube) -> Iterator[str]:
    """The operator's namespace, which warns about everything that the restricted standard would refuse."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    kube.apply(body)
    yield NAMESPACE
    kube.delete(body)


@pytest.fixture(scope="module")
def installed(kube: Kube, system_namespace: str) -> Iterator[dict[tuple[str, str], Object]]:
    """Every object of the chart but the CRDs, which are there already; hooks too, for the sake of validation."""
    objects = [unheard(o) for o in rendered() if o["kind"] != "CustomResourceDefinition"]
    before = list(kube.warnings)
    stored = {(o["kind"], o["metadata"]["name"]): kube.apply(o, manager="helm") for o in objects}
    assert [w for w in kube.warnings if w not in before] == []
    yield stored
    for obj in objects:
        kube.delete(obj)


def unheard(obj: Object) -> Object:
    """No pod runs here, so nobody would answer for the webhooks, and every later write would be refused."""
    if not obj["kind"].endswith("WebhookConfiguration"):
        return obj
    return {**obj, "webhooks": [{**w, "failurePolicy": "Ignore"} for w in obj["webhooks"]]}


def may(kube: Kube, user: str, access: Access, namespace: str = "") -> bool:
    group, resource, verb, name = access
    plain, _, sub = resource.partition("/")
    attributes = {"group": group, "resource": plain, "subresource": sub, "verb": verb, "name": name}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "metadata": {},
        "spec": {"user": user, "resourceAttributes": {**attributes, "namespace": namespace}},
    }
    return bool(kube.create(body, strict=False)["status"]["allowed"])


def test_everything_is_accepted_strictly_and_without_a_warning(installed: dict[tuple[str, str], Object]) -> None:
    kinds = {kind for kind, _ in installed}
    assert kinds >= {"Deployment", "ClusterRole", "Role", "OmniRuntimeProfile", "Job"}
    assert kinds >= {"ValidatingWebhookConfiguration", "MutatingWebhookConfiguration", "PodDisruptionBudget"}


def test_a_second_apply_changes_nothing(kube: Kube, installed: dict[tuple[str, str], Object]) -> None:
    controlled = ("Deployment", "Job", "PodDisruptionBudget")  # their controllers write status
    for obj in map(unheard, rendered()):
        key = (obj["kind"], obj["metadata"]["name"])
        if key in installed and obj["kind"] not in controlled:
            again = kube.apply(obj, manager="helm")
            assert again["metadata"]["resourceVersion"] == installed[key]["metadata"]["resourceVersion"], key


def test_profiles_read_back_as_they_were_rendered(installed: dict[tuple[str, str], Object]) -> None:
    for obj in rendered():
        if obj["kind"] == "OmniRuntimeProfile":
            stored = installed[(obj["kind"], obj["metadata"]["name"])]
            assert obj["spec"].items() <= stored["spec"].items()


def test_the_operator_may_do_what_its_code_does(kube: Kube, installed: dict[tuple[str, str], Object]) -> None:
    for rule in RULES:
        for verb in rule.verbs:
            for name in rule.resource_names or ("",):
                namespace = NAMESPACE if rule.lease_namespace_only else "tenant"
                assert may(kube, OPERATOR, (rule.group, rule.resource, verb, name), namespace), (rule, verb)


def test_the_operator_may_do_nothing_else(kube: Kube, installed: dict[tuple[str, str], Object]) -> None:
    """Every resource that this API server has, with every verb (T62)."""
    used = {
        (r.group, r.resource, v, "")
        for r in RULES
        for v in r.verbs
        if not r.lease_namespace_only and not r.resource_names
    }
    allowed = {
        (group, resource, verb, "")
        for group, resource in every_resource(kube)
        for verb in VERBS
        if may(kube, OPERATOR, (group, resource, verb, ""), "tenant")
    }
    assert allowed == used


def test_the_webhooks_may_do_what_their_code_does_and_nothing_else(
    kube: Kube, installed: dict[tuple[str, str], Object]
) -> None:
    for rule in WEBHOOK_RULES:
        for verb in rule.verbs:
            for name in [WEBHOOK_NAMES[n] for n in rule.resource_names] or [""]:
                namespace = NAMESPACE if rule.lease_namespace_only else "tenant"
                assert may(kube, WEBHOOKS, (rule.group, rule.resource, verb, name), namespace), (rule, verb)
    allowed = {
        (group, resource, verb)
        for group, resource in every_resource(kube)
        for verb in VERBS
        if may(kube, WEBHOOKS, (group, resource, verb, ""), "tenant")
    }
    everywhere = [r for r in WEBHOOK_RULES if not r.lease_namespace_only and not r.resource_names]
    assert allowed == {(r.group, r.resource, v) for r in everywhere for v in r.verbs}
    assert not may(kube, WEBHOOKS, ("", "secrets", "get", "speaker-curve"), NAMESPACE)


@pytest.mark.parametrize(
    ("access", "namespace"),
    [
        (("", "secrets", "get", "speaker-curve"), "tenant"),
        (("", "secrets", "list", ""), "tenant"),
        (("", "secrets", "list", ""), NAMESPACE),
        (("", "secrets", "watch", ""), ""),
        (("", "pods/exec", "create", "speaker-entry"), "tenant"),
        (("", "serviceaccounts/token", "create", "speaker"), "tenant"),
        (("serving.omni.dev", "omnipipelines", "patch", "speaker"), "tenant"),
        (("coordination.k8s.io", "leases", "update", "omni-operator"), "kube-system"),
        (("apiextensions.k8s.io", "customresourcedefinitions", "get", "other.example.com"), ""),
        (("apiextensions.k8s.io", "customresourcedefinitions", "patch", "omnistages.serving.omni.dev"), ""),
    ],
)
def test_refused(kube: Kube, installed: dict[tuple[str, str], Object], access: Access, namespace: str) -> None:
    assert not may(kube, OPERATOR, access, namespace)


def test_the_upgrade_hook_writes_our_crds_only(kube: Kube, installed: dict[tuple[str, str], Object]) -> None:
    group, resource = "apiextensions.k8s.io", "customresourcedefinitions"
    for crd in build_crds():
        for verb in ("get", "patch", "create"):
            assert may(kube, CRD_HOOK, (group, resource, verb, crd["metadata"]["name"]))
    assert not may(kube, CRD_HOOK, (group, resource, "patch", "other.example.com"))
    assert not may(kube, CRD_HOOK, (group, resource, "delete", "omnistages.serving.omni.dev"))
    assert not may(kube, CRD_HOOK, ("", "secrets", "get", "x"), NAMESPACE)


def test_an_old_crd_is_brought_up_to_date_whoever_installed_it(kube: Kube, kubeconfig: Path) -> None:
    crd = build_crds()[0]
    metadata = {"name": crd["metadata"]["name"], "annotations": {SCHEMA_VERSION_ANNOTATION: "0"}}
    kube.apply({**crd, "metadata": metadata}, manager="helm")
    install(KubernetesCrds(kubeconfig), build_crds())
    stored = kube.get(crd)
    assert stored["metadata"]["annotations"][SCHEMA_VERSION_ANNOTATION] == str(SCHEMA_VERSION)
    before = stored["metadata"]["resourceVersion"]
    install(KubernetesCrds(kubeconfig), build_crds())
    assert kube.get(crd)["metadata"]["resourceVersion"] == before, "a second upgrade to the same version writes nothing"


def test_hooks_are_hooks() -> None:
    assert [o["kind"] for o in rendered() if is_hook(o)] == [
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Job",
    ]


def every_resource(kube: Kube) -> list[tuple[str, str]]:
    groups = kube.request("GET", "/apis")["groups"]
    found = []
    for version, path in [("", "/api/v1")] + [
        (g["name"], f"/apis/{g['preferredVersion']['groupVersion']}") for g in groups
    ]:
        found += [(version, r["name"]) for r in kube.request("GET", path)["resources"]]
    return found
