"""What the chart renders: the same every time, valid, restricted, and no permission that the code does not use."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.rbac import RULES
from tests.unit.chart.render import CHART, Object, is_hook, of_kind, rendered, template

ROOT = CHART.parents[1]
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
VARIANTS = [
    (),
    ("--set", "defaultProfile=cpu", "--set", "images.pullSecrets={a,b}", "--set", "operator.namespaces={x,y}"),
    ("--set", "crds.upgradeJob=false", "--set", "profiles.cuda.enabled=false"),
    ("--set", "operator.podLabels.team=voice", "--set", "operator.priorityClassName=high"),
    ("--api-versions", "monitoring.coreos.com/v1/PodMonitor"),
    ("--set", "webhooks.enabled=false"),
    ("--set", "webhooks.certificates.mode=CertManager", "--set", "webhooks.disabledRules={NameConflict}"),
    (
        "--set", "webhooks.certificates.mode=Provided", "--set", "webhooks.certificates.secretName=mine",
        "--set", "webhooks.certificates.caBundle=QQ==",
    ),
]  # fmt: skip
OPERATOR, WEBHOOKS = "omni-operator", "omni-operator-webhooks"


def named(kind: str, name: str, *options: str) -> Object:
    (found,) = [o for o in of_kind(rendered(*options), kind) if o["metadata"]["name"] == name]
    return found


def test_generated_files_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import chart
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    assert chart.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("options", VARIANTS, ids=lambda v: " ".join(v) or "defaults")
def test_twice_rendered_is_the_same_and_has_no_key_twice(options: tuple[str, ...]) -> None:
    first, second = template(*options).stdout, template(*options).stdout
    assert first == second, "a GitOps tool would apply a change every time that it looks (T21)"
    assert rendered(*options)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda v: " ".join(v) or "defaults")
def test_labels_and_names_are_valid(options: tuple[str, ...]) -> None:
    for obj in rendered(*options):
        where = f"{obj['kind']} {obj['metadata']['name']}"
        assert len(obj["metadata"]["name"]) <= 63, where
        for labels in _label_maps(obj):
            for key, value in labels.items():
                assert LABEL_KEY.fullmatch(key), f"{where}: {key}"
                assert isinstance(value, str), f"{where}: {key}"
                assert LABEL_VALUE.fullmatch(value), f"{where}: {key}={value}"


@pytest.mark.parametrize("release", ["omni-operator", "x", "a" * 53])
def test_any_release_name_gives_valid_and_distinct_names(release: str) -> None:
    objects = rendered(release=release)
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, _, name in names)


def test_namespaced_objects_are_in_the_release_namespace() -> None:
    cluster_wide = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "OmniRuntimeProfile"}
    cluster_wide |= {"ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"}
    for obj in rendered():
        expected = None if obj["kind"] in cluster_wide else "omni-system"
        assert obj["metadata"].get("namespace") == expected, obj["kind"]


class TestOperatorPod:
    def deployment(self) -> Object:
        return named("Deployment", OPERATOR)

    def test_never_two_operators_at_once(self) -> None:
        spec = self.deployment()["spec"]
        assert spec["replicas"] == 1
        assert spec["strategy"] == {"type": "Recreate"}, "two versions would fight (T11)"

    def test_selectors_hold_what_never_changes(self) -> None:
        spec = self.deployment()["spec"]
        assert set(spec["selector"]["matchLabels"]) == {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()

    def test_no_other_pod_has_the_labels_of_its_service(self) -> None:
        pods = {
            o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"]
            for o in rendered()
            if o["kind"] in ("Deployment", "Job")
        }
        for service, own in ((f"{OPERATOR}-metrics", OPERATOR), (WEBHOOKS, WEBHOOKS)):
            selector = named("Service", service)["spec"]["selector"]
            assert [name for name, labels in pods.items() if selector.items() <= labels.items()] == [own], service

    def test_probes_and_ports_agree(self) -> None:
        (container,) = self.deployment()["spec"]["template"]["spec"]["containers"]
        ports = {p["name"] for p in container["ports"]}
        paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
        assert paths == {"/livez", "/readyz"}
        assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")} <= ports
        service = named("Service", f"{OPERATOR}-metrics")
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports

    def test_its_options_are_options_of_the_program(self) -> None:
        """A value of the chart that nothing reads is a broken promise (T36)."""
        from omni_operator.autoscale.types import Tuning
        from omni_operator.main import parse_options

        options = (
            "--set",
            "operator.namespaces={x,y}",
            "--set",
            "operator.workers=3",
            "--set",
            "operator.resyncSeconds=60",
            "--set",
            "operator.scaling.periodSeconds=20",
            "--set",
            "operator.scaling.tuning.scale_down_seconds=600",
            "--set",
            "operator.scaling.tuning.margin=0.7",
        )
        (container,) = named("Deployment", OPERATOR, *options)["spec"]["template"]["spec"]["containers"]
        read = parse_options(container["args"])
        assert read.controller.namespaces == ("x", "y")
        assert read.controller.workers == 3
        assert read.controller.resync_seconds == 60
        assert read.controller.scaling_period_seconds == 20
        assert read.controller.tuning == replace(Tuning(), scale_down_seconds=600.0, margin=0.7)
        assert [p["containerPort"] for p in container["ports"]] == [read.http_port]


def test_every_tuning_of_the_autoscaler_is_a_value_of_the_chart() -> None:
    from omni_operator.autoscale.types import Tuning

    schema = json.loads((CHART / "values.schema.json").read_text())
    tuning = schema["properties"]["operator"]["properties"]["scaling"]["properties"]["tuning"]
    assert set(tuning["properties"]) == {f.name for f in fields(Tuning)}


@pytest.mark.parametrize("name", [OPERATOR, WEBHOOKS, "omni-operator-crds"])
def test_pods_meet_the_restricted_standard(name: str) -> None:
    (workload,) = [o for o in rendered() if o["kind"] in ("Deployment", "Job") and o["metadata"]["name"] == name]
    spec = workload["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all(set(volume) <= {"name", "emptyDir"} for volume in spec["volumes"])
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


class TestPermissions:
    def test_they_are_the_table_of_the_code(self) -> None:
        granted = {
            (kind, group, resource, verb, tuple(rule.get("resourceNames", ())))
            for kind in ("ClusterRole", "Role")
            for role in of_kind(rendered(), kind)
            if not role["metadata"]["name"].startswith(WEBHOOKS)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        used = {
            ("Role" if r.lease_namespace_only else "ClusterRole", r.group, r.resource, verb, r.resource_names)
            for r in RULES
            for verb in r.verbs
        }
        assert granted == used

    def test_no_wildcards_and_no_secrets_are_read(self) -> None:
        for role in [*of_kind(rendered(), "ClusterRole", hooks=True), *of_kind(rendered(), "Role")]:
            for rule in role["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], role["metadata"]["name"]
                if "secrets" in rule["resources"] and role["metadata"]["name"] == WEBHOOKS:
                    assert role["kind"] == "Role", "its own namespace only"
                    assert rule["verbs"] == ["create"] or rule["resourceNames"] == [f"{WEBHOOKS}-tls"]
                elif "secrets" in rule["resources"]:
                    assert rule["verbs"] == ["create"], "keys are made once and never read back (T62)"

    def test_bindings_name_the_service_account_of_the_pod(self) -> None:
        for name in (OPERATOR, WEBHOOKS):
            account = named("Deployment", name)["spec"]["template"]["spec"]["serviceAccountName"]
            assert account == name
            assert named("ServiceAccount", account)
        for binding in [*of_kind(rendered(), "ClusterRoleBinding"), *of_kind(rendered(), "RoleBinding")]:
            account = WEBHOOKS if binding["metadata"]["name"].startswith(WEBHOOKS) else OPERATOR
            assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "omni-system"}]

    def test_only_the_upgrade_hook_may_write_crds_and_only_ours(self) -> None:
        (role,) = [r for r in of_kind(rendered(), "ClusterRole", hooks=True) if is_hook(r)]
        crds = {o["metadata"]["name"] for o in of_kind(rendered(), "CustomResourceDefinition")}
        by_verb = {verb: set(rule.get("resourceNames", ())) for rule in role["rules"] for verb in rule["verbs"]}
        assert by_verb == {"get": crds, "patch": crds, "create": set()}


class TestCrds:
    def test_all_are_installed_first_and_upgraded_by_the_hook(self) -> None:
        assert {o["metadata"]["name"] for o in of_kind(rendered(), "CustomResourceDefinition")} == {
            f"{plural}.serving.omni.dev"
            for plural in ("omnipipelines", "omnistages", "omniruntimeprofiles", "omnitenants")
        }
        hooks = [o for o in rendered() if is_hook(o)]
        assert {o["kind"] for o in hooks} == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}
        weights = {o["kind"]: int(o["metadata"]["annotations"]["helm.sh/hook-weight"]) for o in hooks}
        assert all(weights["Job"] > weight for kind, weight in weights.items() if kind != "Job")
        assert {o["metadata"]["annotations"]["helm.sh/hook"] for o in hooks} == {"pre-upgrade"}

    def test_the_hook_can_be_left_to_gitops_tools(self) -> None:
        assert not [o for o in rendered("--set", "crds.upgradeJob=false") if is_hook(o)]

    def test_the_hook_runs_a_module_that_exists(self) -> None:
        import importlib.util

        (job,) = of_kind(rendered(), "Job", hooks=True)
        python, flag, module = job["spec"]["template"]["spec"]["containers"][0]["command"]
        assert (python, flag) == ("python", "-m")
        assert importlib.util.find_spec(module) is not None


class TestProfiles:
    def test_they_are_profiles(self) -> None:
        found = {
            p.metadata.name: p
            for p in map(OmniRuntimeProfile.model_validate, of_kind(rendered(), "OmniRuntimeProfile"))
        }
        assert sorted(found) == ["cpu", "cuda", "npu", "rocm"]
        for profile in found.values():
            assert all(c.memory for c in profile.spec.device_classes)
        assert {c.resource_name for p in found.values() for c in p.spec.device_classes} == {
            None, "nvidia.com/gpu", "amd.com/gpu", "huawei.com/Ascend910B", "huawei.com/Ascend910C",
        }  # fmt: skip

    def test_no_field_is_lost_on_the_way(self) -> None:
        """What stands in values.yaml stands in the object; a misspelt field would vanish in the API server."""
        values = yaml.safe_load((CHART / "values.yaml").read_text())["profiles"]
        for profile in of_kind(rendered(), "OmniRuntimeProfile"):
            wanted = values[profile["metadata"]["name"]]
            spec = {k: v for k, v in profile["spec"].items() if k != "images"}
            assert spec == {k: v for k, v in wanted.items() if k not in ("enabled", "image", "connectorImage")}
            parsed = OmniRuntimeProfile.model_validate(profile).spec.model_dump(
                mode="json", by_alias=True, exclude_none=True
            )
            assert spec.items() <= parsed.items()

    def test_one_may_name_a_folder_of_its_nodes(self) -> None:
        folder = rendered("--set", "profiles.cuda.nodeLocalVolume.hostPath=/run/omni")
        found = {p["metadata"]["name"]: p["spec"] for p in of_kind(folder, "OmniRuntimeProfile")}
        assert found["cuda"]["nodeLocalVolume"] == {"hostPath": "/run/omni"}
        assert "nodeLocalVolume" not in found["cpu"]

    def test_one_may_send_by_rdma(self) -> None:
        mooncake = {"protocol": "RDMA", "devices": ["mlx5_0", "mlx5_1"], "resource": {"name": "rdma/hca", "count": 1}}
        found = rendered("--set-json", f"profiles.cuda.mooncake={json.dumps(mooncake)}")
        specs = {p["metadata"]["name"]: p["spec"] for p in of_kind(found, "OmniRuntimeProfile")}
        assert specs["cuda"]["mooncake"] == mooncake
        assert "mooncake" not in specs["cpu"]

    def test_one_can_be_the_default(self) -> None:
        found = {
            p["metadata"]["name"]: p["spec"]
            for p in of_kind(rendered("--set", "defaultProfile=cpu"), "OmniRuntimeProfile")
        }
        assert found["default"] == found["cpu"]

    def test_one_can_be_left_out(self) -> None:
        found = of_kind(rendered("--set", "profiles.cuda.enabled=false"), "OmniRuntimeProfile")
        assert "cuda" not in {p["metadata"]["name"] for p in found}


@pytest.mark.parametrize(
    ("options", "image"),
    [
        pytest.param((), "omni-operator/operator:0.1.0", id="name"),
        pytest.param(("--set", "images.tag=v9"), "omni-operator/operator:v9", id="tag"),
        pytest.param(("--set", "images.registry=reg.example.com:5000/x/"), "reg.example.com:5000/x/omni-operator/operator:0.1.0", id="registry"),
        pytest.param(("--set", "images.operator=localhost:5000/op:1", "--set", "images.registry=r"), "localhost:5000/op:1", id="full reference"),
        pytest.param(("--set", "images.operator=localhost:5000/op"), "localhost:5000/op:0.1.0", id="port is no tag"),
        pytest.param(("--set", "images.operator=op@sha256:00"), "op@sha256:00", id="digest"),
    ],
)  # fmt: skip
def test_image_references(options: tuple[str, ...], image: str) -> None:
    for deployment in of_kind(rendered(*options), "Deployment"):
        assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("operator.logLevl=INFO", "logLevl"),
        ("operator.workers=0", "workers"),
        ("operator.scaling.periodSeconds=0", "periodSeconds"),
        ("operator.scaling.tuning.scale_down=60", "scale_down"),
        ("operator.scaling.tuning.margin=often", "margin"),
        ("images.pullPolicy=Sometimes", "pullPolicy"),
        ("profiles.cpu.vendor=arm", "vendor"),
        ("profiles.cpu.deviceClass=x", "deviceClass"),
        ("profiles.Cpu.enabled=true", "Cpu"),
        ("profiles.cpu.nodeLocalVolume.hostPath=run/omni", "hostPath"),
        ("profiles.cpu.nodeLocalVolume.path=/run/omni", "nodeLocalVolume"),
        ("profiles.cpu.mooncake.protocol=rdma", "protocol"),
        ("profiles.cpu.mooncake.device=mlx5_0", "mooncake"),
        ("profiles.cpu.mooncake.resource.count=1", "name"),
        ("profiles.cpu.image=cpuu", "images.cpuu is not set"),
        ("profiles.cpu.connectorImage=conector", "images.conector is not set"),
        ("defaultProfile=gpu", "not one of profiles: cpu, cuda, npu, rocm"),
        ("crds.upgradeJob=maybe", "upgradeJob"),
    ],
)
def test_wrong_values_are_refused_by_name(option: str, says: str) -> None:
    result = template("--set", option, check=False)
    assert result.returncode != 0
    assert says in result.stderr


def test_the_images_of_a_checkout_are_values_of_the_chart(tmp_path: Path) -> None:
    """What `omni image values` prints is what the demo gives to helm."""
    from omni_image.cli import app

    printed = CliRunner().invoke(app, ["values"])
    assert printed.exit_code == 0, printed.output
    (tmp_path / "values.yaml").write_text(printed.output)
    objects = rendered("--values", str(tmp_path / "values.yaml"))
    images = json.loads(printed.output)["images"]
    for deployment in of_kind(objects, "Deployment"):
        assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == images["operator"]
    cpu = next(p for p in of_kind(objects, "OmniRuntimeProfile") if p["metadata"]["name"] == "cpu")
    expected = {"runtime": images["cpu"], "connector": images["connector"], "pullPolicy": "IfNotPresent"}
    assert cpu["spec"]["images"] == expected


def test_sidecars_run_from_the_small_image_where_a_profile_says_so() -> None:
    """Those of the chart do, whatever the accelerator; one that does not say it keeps to one image."""
    mine = {"enabled": True, "vendor": "nvidia", "image": "cuda", "deviceClasses": [{"name": "a", "memory": "10Gi"}]}
    objects = rendered("--set-json", f"profiles.mine={json.dumps(mine)}", "--set", "profiles.npu.connectorImage=")
    images = {p["metadata"]["name"]: p["spec"]["images"] for p in of_kind(objects, "OmniRuntimeProfile")}
    with_one = {
        name for name, image in images.items() if image.get("connector", "").startswith("omni-operator/connector:")
    }
    assert with_one == {"cpu", "cuda", "rocm"}
    assert all("connector" not in images[name] for name in ("npu", "mine"))


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(values) == set(schema) - {"global"}
    assert set(values["operator"]) == set(schema["operator"]["properties"])
    assert set(values["webhooks"]) == set(schema["webhooks"]["properties"])
    for inner in ("certificates", "placement"):
        assert set(values["webhooks"][inner]) == set(schema["webhooks"]["properties"][inner]["properties"])
    assert set(values["metrics"]["podMonitor"]) == set(schema["metrics"]["properties"]["podMonitor"]["properties"])


def test_pod_monitor_only_where_its_kind_exists() -> None:
    assert not of_kind(rendered(), "PodMonitor")
    monitors = of_kind(rendered("--api-versions", "monitoring.coreos.com/v1/PodMonitor"), "PodMonitor")
    assert [m["metadata"]["name"] for m in monitors] == [OPERATOR, WEBHOOKS]
    for monitor in monitors:
        assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "interval": "30s"}]


def _label_maps(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("labels", "matchLabels", "nodeSelector") and isinstance(inner, dict) and "type" not in inner:
                yield inner
            else:
                yield from _label_maps(inner)
    elif isinstance(value, list):
        for item in value:
            yield from _label_maps(item)


def test_the_crds_of_the_chart_are_those_of_the_repository() -> None:
    ours = {p.name: p.read_text() for p in (ROOT / "crds").glob("*.yaml")}
    assert {p.name: p.read_text() for p in Path(CHART / "crds").glob("*.yaml")} == ours
