"""The admission webhooks in the chart: who is asked, what happens when nobody answers, and where certificates come from."""

from __future__ import annotations

from typing import Any

import pytest

from omni_webhooks import rbac
from tests.unit.chart.render import Object, of_kind, rendered, template

NAME = "omni-operator-webhooks"


def configurations(*options: str) -> list[Object]:
    found = rendered(*options)
    return of_kind(found, "ValidatingWebhookConfiguration") + of_kind(found, "MutatingWebhookConfiguration")


def webhooks(*options: str) -> dict[str, Object]:
    return {w["name"].split(".")[0]: w for c in configurations(*options) for w in c["webhooks"]}


def deployment(*options: str) -> Object:
    (found,) = [o for o in of_kind(rendered(*options), "Deployment") if o["metadata"]["name"] == NAME]
    return found


def container(*options: str) -> Object:
    (found,) = deployment(*options)["spec"]["template"]["spec"]["containers"]
    return found


class TestWhoIsAsked:
    def test_only_our_own_kinds(self) -> None:
        """Whatever happens to the webhooks, nothing of the cluster's own can be blocked by them."""
        for webhook in webhooks().values():
            for rule in webhook["rules"]:
                assert rule["apiGroups"] == ["serving.omni.dev"]
                assert not {"*", "*/*"} & {*rule["resources"], *rule["operations"], *rule["apiVersions"]}

    def test_no_status_is_asked_about_and_deletions_only_where_nobody_waits(self) -> None:
        for name, webhook in webhooks().items():
            for rule in webhook["rules"]:
                assert not [r for r in rule["resources"] if r.endswith("/status")]
                if "DELETE" in rule["operations"]:
                    assert webhook["failurePolicy"] == "Ignore", name

    @pytest.mark.parametrize(
        ("name", "policy"),
        [
            pytest.param("pipelines", "Fail", id="what a tenant writes is refused while nobody can judge it"),
            pytest.param("tenants", "Fail", id="budgets, too"),
            pytest.param("pipeline-defaults", "Fail", id="and never stored without its defaults"),
            pytest.param("profiles", "Ignore", id="the chart writes profiles before the webhooks can answer"),
            pytest.param("scale", "Ignore", id="autoscalers go on"),
        ],
    )
    def test_what_happens_when_nobody_answers(self, name: str, policy: str) -> None:
        assert webhooks()[name]["failurePolicy"] == policy

    def test_every_call_is_short_and_without_side_effects(self) -> None:
        for webhook in webhooks().values():
            assert webhook["timeoutSeconds"] == 5
            assert webhook["sideEffects"] == "None"
            assert webhook["admissionReviewVersions"] == ["v1"]

    def test_kube_system_is_left_alone(self) -> None:
        for name in ("pipelines", "pipeline-defaults", "scale"):
            (expression,) = webhooks()[name]["namespaceSelector"]["matchExpressions"]
            assert expression == {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}

    def test_conditions_exempt_the_operator_the_deleted_and_what_leaves_the_spec_alone(self) -> None:
        conditions = {c["name"]: c["expression"] for c in webhooks()["pipelines"]["matchConditions"]}
        assert set(conditions) == {"not-the-operator", "not-being-deleted", "spec-changed"}
        assert "system:serviceaccount:omni-system:omni-operator'" in conditions["not-the-operator"]

    def test_off_means_nothing_is_left(self) -> None:
        objects = rendered("--set", "webhooks.enabled=false")
        assert not [o["metadata"]["name"] for o in objects if "webhook" in o["metadata"]["name"]]


class TestPods:
    def test_one_replica_is_never_all(self) -> None:
        spec = deployment()["spec"]
        assert spec["replicas"] == 2
        assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        (budget,) = [o for o in of_kind(rendered(), "PodDisruptionBudget") if o["metadata"]["name"] == NAME]
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        (term,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"

    def test_the_service_leads_to_the_port_that_listens(self) -> None:
        (service,) = [o for o in of_kind(rendered(), "Service") if o["metadata"]["name"] == NAME]
        ports = {p["name"]: p["containerPort"] for p in container()["ports"]}
        assert [p["targetPort"] for p in service["spec"]["ports"]] == ["https"]
        for webhook in webhooks().values():
            reference = webhook["clientConfig"]["service"]
            assert (reference["name"], reference["namespace"]) == (NAME, "omni-system")
            assert reference["path"] in ("/validate", "/mutate")
        from omni_webhooks.main import parse_options

        options = parse_options(container()["args"])
        assert (options.port, options.http_port) == (ports["https"], ports["http"])

    def test_its_options_are_options_of_the_program(self) -> None:
        from omni_webhooks.main import parse_options

        options = parse_options(container("--set", "webhooks.disabledRules={NameConflict,UnpinnedModel}")["args"])
        assert options.configuration == NAME
        assert options.secret == f"{NAME}-tls"
        assert options.hosts == (f"{NAME}.omni-system.svc", f"{NAME}.omni-system.svc.cluster.local")
        assert not {"NameConflict", "UnpinnedModel"} & {rule.name for rule in options.rules}

    def test_placement_policy(self) -> None:
        from omni_webhooks.main import parse_options
        from omni_webhooks.site import PlacementOptions

        values = {"nodes": "false", "domainLabel": "topology.kubernetes.io/zone"}
        options = [part for name, value in values.items() for part in ("--set", f"webhooks.placement.{name}={value}")]
        read = parse_options(container(*options)["args"]).placement
        assert read == PlacementOptions(nodes=False, domain_label="topology.kubernetes.io/zone")
        assert parse_options(container()["args"]).placement == PlacementOptions()

    def test_a_pod_has_time_to_drain(self) -> None:
        from omni_webhooks.main import LAST_REVIEW_SECONDS, parse_options

        grace = deployment()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert parse_options(container()["args"]).drain_seconds + LAST_REVIEW_SECONDS < grace


class TestCertificates:
    def test_helm_renders_neither_the_secret_nor_an_empty_authority(self) -> None:
        """T21: a Git tool that applied them again would take the certificate away."""
        assert not of_kind(rendered(), "Secret")
        assert all("caBundle" not in w["clientConfig"] for w in webhooks().values())

    def test_cert_manager(self) -> None:
        options = ("--set", "webhooks.certificates.mode=CertManager")
        authority, certificate = of_kind(rendered(*options), "Certificate")
        assert f"{NAME}.omni-system.svc" in certificate["spec"]["dnsNames"]
        assert certificate["spec"]["issuerRef"] == {"kind": "Issuer", "name": NAME}
        root, issuer = of_kind(rendered(*options), "Issuer")
        assert issuer["spec"] == {"ca": {"secretName": authority["spec"]["secretName"]}}
        assert authority["spec"]["issuerRef"]["name"] == root["metadata"]["name"]
        assert authority["spec"]["isCA"], "a renewal of the certificate leaves the authority as it is"
        for configuration in configurations(*options):
            annotations = configuration["metadata"]["annotations"]
            assert annotations == {"cert-manager.io/inject-ca-from": f"omni-system/{NAME}"}
        self._mounted(options, certificate["spec"]["secretName"])

    def test_an_issuer_of_ones_own(self) -> None:
        options = (
            "--set",
            "webhooks.certificates.mode=CertManager",
            "--set",
            "webhooks.certificates.issuerRef.name=corp",
        )
        (certificate,) = of_kind(rendered(*options), "Certificate")
        assert certificate["spec"]["issuerRef"] == {"name": "corp"}
        assert not of_kind(rendered(*options), "Issuer")

    def test_provided(self) -> None:
        options = (
            "--set", "webhooks.certificates.mode=Provided", "--set", "webhooks.certificates.secretName=mine",
            "--set", "webhooks.certificates.caBundle=QQ==",
        )  # fmt: skip
        assert {w["clientConfig"]["caBundle"] for w in webhooks(*options).values()} == {"QQ=="}
        self._mounted(options, "mine")

    @pytest.mark.parametrize("missing", ["secretName", "caBundle"])
    def test_provided_needs_both(self, missing: str) -> None:
        given = {"secretName": "mine", "caBundle": "QQ=="} | {missing: ""}
        options = [f"--set=webhooks.certificates.{name}={value}" for name, value in given.items()]
        refused = template("--set=webhooks.certificates.mode=Provided", *options, check=False)
        assert refused.returncode != 0
        assert missing in refused.stderr

    def _mounted(self, options: tuple[str, ...], secret: str) -> None:
        """Made by somebody else: mounted, and no right to write Secrets or configurations."""
        from omni_webhooks.main import parse_options

        (volume,) = [v for v in deployment(*options)["spec"]["template"]["spec"]["volumes"] if v["name"] == "tls"]
        (mount,) = [m for m in container(*options)["volumeMounts"] if m["name"] == "tls"]
        assert volume["secret"]["secretName"] == secret
        assert str(parse_options(container(*options)["args"]).certificate_dir) == mount["mountPath"]
        assert permissions(*options) == table(rbac.CACHE_RULES)


def permissions(*options: str) -> set[tuple[Any, ...]]:
    return {
        (kind, group, resource, verb, tuple(rule.get("resourceNames", ())))
        for kind in ("ClusterRole", "Role")
        for role in of_kind(rendered(*options), kind)
        if role["metadata"]["name"].startswith(NAME)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def table(rules: tuple[rbac.Rule, ...]) -> set[tuple[Any, ...]]:
    names = {rbac.SECRET_NAME: f"{NAME}-tls", rbac.CONFIGURATION_NAME: NAME}
    return {
        (
            "Role" if r.lease_namespace_only else "ClusterRole",
            r.group,
            r.resource,
            verb,
            tuple(names[n] for n in r.resource_names),
        )
        for r in rules
        for verb in r.verbs
    }


def test_permissions_are_the_table_of_the_code() -> None:
    assert permissions() == table(rbac.RULES)


def test_nothing_of_the_cluster_is_written_but_its_own_secret_and_configurations() -> None:
    writes = {(r, v, names) for _, _, r, v, names in permissions() if v not in ("get", "list", "watch")}
    assert writes == {
        ("secrets", "create", ()),
        ("secrets", "update", (f"{NAME}-tls",)),
        ("validatingwebhookconfigurations", "update", (NAME,)),
        ("mutatingwebhookconfigurations", "update", (NAME,)),
    }
