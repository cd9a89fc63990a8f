"""The four CRDs as they are checked in: fresh, small, documented, and built by the API conventions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from omni_crds import SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION, schema_is_outdated
from omni_crds.__main__ import CRD_FOLDER, REFERENCE, generated_crds, main
from omni_crds.crd import KINDS, Kind, build_crd, build_schema
from omni_crds.docs import render_reference
from omni_crds.v1alpha1.pipeline import PayloadKind
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_runtime.topology.types import EngineKind, PayloadContract

Schema = dict[str, Any]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema with its path, fields of list items as `[]`."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")


def spec_and_status(kind: Kind) -> list[tuple[str, Schema]]:
    properties = build_schema(kind)["properties"]
    return [*walk(properties["spec"], ".spec"), *walk(properties["status"], ".status")]


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(("name", "text"), generated_crds().items())
def test_checked_in_crd_equals_the_types(name: str, text: str) -> None:
    assert (CRD_FOLDER / name).read_text() == text, "run python -m omni_crds"


def test_no_crd_of_a_kind_that_is_gone() -> None:
    assert {path.name for path in CRD_FOLDER.glob("*.yaml")} == generated_crds().keys()


def test_checked_in_reference_equals_the_types() -> None:
    assert REFERENCE.read_text() == render_reference(), "run python -m omni_crds --docs"


@pytest.mark.parametrize(("name", "text"), generated_crds().items())
def test_crd_stays_below_200_kb(name: str, text: str) -> None:
    """Above 262,144 bytes `kubectl apply` cannot store its annotation (T57)."""
    assert len(text.encode()) < 200_000


@pytest.mark.parametrize(
    ("kind", "text"), list(zip(KINDS, generated_crds().values(), strict=True)), ids=lambda v: getattr(v, "name", "")
)
def test_yaml_reads_back_as_the_same_object(kind: Kind, text: str) -> None:
    assert yaml.safe_load(text) == yaml.safe_load(yaml.safe_dump(build_crd(kind)))
    assert "&id" not in text, "anchors are legal YAML, and unreadable"


def test_check_fails_on_a_stale_file_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--check", "--output", str(tmp_path)]) == 0
    stale = tmp_path / "omnistages.serving.omni.dev.yaml"
    stale.write_text(stale.read_text().replace("kubectl scale", "kubectl scaling"))
    assert main(["--check", "--output", str(tmp_path)]) == 1
    assert str(stale) in capsys.readouterr().err
    stale.unlink()
    assert main(["--check", "--output", str(tmp_path)]) == 1


# ------------------------------------------------------------------------------------------ conventions


@kinds
def test_every_field_is_described(kind: Kind) -> None:
    fields = [(path, schema) for path, schema in spec_and_status(kind) if not path.endswith("[]")]
    assert [path for path, schema in fields if not schema.get("description")] == []


@kinds
def test_conventions_of_kubernetes_apis(kind: Kind) -> None:
    """No floats, no nulls, no phase, no durations as text, an enum where a bool could grow."""
    for path, schema in spec_and_status(kind):
        assert schema["type"] not in ("number", "boolean"), path
        assert "nullable" not in schema, path
        assert not path.lower().endswith((".phase", "duration", "timeout")), path


@kinds
def test_conditions_come_first_and_are_a_map_by_type(kind: Kind) -> None:
    status = build_schema(kind)["properties"]["status"]["properties"]
    assert next(iter(status)) == "conditions"
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert "observedGeneration" in status


@kinds
def test_no_default_where_somebody_else_writes(kind: Kind) -> None:
    """A default on replicas comes back with every manifest and fights whoever scales (T13); status has one writer."""
    for path, schema in spec_and_status(kind):
        if "replicas" in path.lower() or path.startswith(".status"):
            assert "default" not in schema, path


@kinds
def test_spec_is_required_and_status_is_not(kind: Kind) -> None:
    assert build_schema(kind)["required"] == ["spec"]


def test_only_stages_scale_and_the_selector_is_known() -> None:
    """Without labelSelectorPath an HPA says "selector is required" (T16)."""
    scale = {k.name: build_crd(k)["spec"]["versions"][0]["subresources"].get("scale") for k in KINDS}
    assert scale.pop("OmniStage") == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    assert set(scale.values()) == {None}


@kinds
def test_printer_columns_point_at_fields(kind: Kind) -> None:
    """A path that leads nowhere shows an empty column and no error."""
    known = {path.replace("[]", "[*]") for path, _ in spec_and_status(kind)} | {".metadata.creationTimestamp"}
    for column in kind.columns:
        path = column.path
        if "?(" in path:
            path = ".status.conditions[*]" + path[path.index("]") + 1 :]
        assert path in known, column


def test_names_do_not_collide() -> None:
    names = [name for k in KINDS for name in (k.plural, k.name.lower(), k.short_name)]
    assert len(names) == len(set(names))
    # Short names of what is commonly installed beside us.
    taken = [
        "po",
        "svc",
        "cm",
        "ns",
        "no",
        "pv",
        "pvc",
        "sa",
        "ep",
        "rs",
        "rc",
        "ds",
        "deploy",
        "sts",
        "hpa",
        "cj",
        "ing",
        "netpol",
        "pdb",
        "crd",
        "sc",
        "pc",
        "csr",
        "ev",
        "quota",
        "limits",
        "cs",
        "lws",
        "wl",
        "cq",
        "lq",
        "isvc",
        "llmisvc",
        "app",
    ]
    assert not set(names) & set(taken)


def test_every_rule_says_how_to_put_it_right() -> None:
    for kind in KINDS:
        for path, schema in spec_and_status(kind):
            for rule in schema.get("x-kubernetes-validations", ()):
                assert rule["message"], path
                assert len(rule["message"]) > 20, f"{path}: {rule['message']!r} does not help"


# ------------------------------------------------------------------------------------------ agreement with others


def test_payload_kinds_are_those_of_the_runtime() -> None:
    """The types must not import the runtime, so the names stand twice."""
    assert [k.value for k in PayloadKind] == [c.value for c in PayloadContract]


def test_every_engine_of_the_runtime_can_be_named() -> None:
    schema = build_schema(KINDS[0])["properties"]["spec"]["properties"]["stages"]["items"]["properties"]["engine"]
    assert all(len(kind.value) <= schema["maxLength"] for kind in EngineKind)


@pytest.mark.parametrize("field", ["modelCache", "nodeLocalVolume"])
@pytest.mark.parametrize("path", ["run/omni", "/", "/a b", ""])
def test_folders_of_nodes_are_absolute(field: str, path: str) -> None:
    """A relative path would be a pod that the API server refuses, of a profile that it took."""
    spec = {"vendor": "cpu", "images": {"runtime": "x"}, "deviceClasses": [{"name": "cpu", "memory": "1Gi"}]}
    OmniRuntimeProfile.model_validate({"spec": {**spec, field: {"hostPath": "/run/omni"}}})
    with pytest.raises(ValidationError) as refused:
        OmniRuntimeProfile.model_validate({"spec": {**spec, field: {"hostPath": path}}})
    assert [e["loc"] for e in refused.value.errors()] == [("spec", field, "hostPath")]


@pytest.mark.parametrize("device", ["mlx5_0,mlx5_1", "mlx5 0", "", "-a", "m" * 64, "a/b"])
def test_names_of_rdma_devices_hold_one_name(device: str) -> None:
    """They are joined with commas for Mooncake; one that holds a comma would be two."""
    spec = {"vendor": "cpu", "images": {"runtime": "x"}, "deviceClasses": [{"name": "cpu", "memory": "1Gi"}]}
    mooncake = {"protocol": "RDMA", "devices": ["mlx5_0"], "resource": {"name": "rdma/hca"}}
    read = OmniRuntimeProfile.model_validate({"spec": {**spec, "mooncake": mooncake}}).spec.mooncake
    assert read is not None
    assert read.resource is not None
    assert (read.devices, read.resource.count) == (("mlx5_0",), 1)
    with pytest.raises(ValidationError) as refused:
        OmniRuntimeProfile.model_validate({"spec": {**spec, "mooncake": {**mooncake, "devices": [device]}}})
    assert ("spec", "mooncake", "devices", 0) in [e["loc"] for e in refused.value.errors()]


# ------------------------------------------------------------------------------------------ schema version (T58)


@pytest.mark.parametrize(
    ("annotations", "outdated"),
    [
        pytest.param({SCHEMA_VERSION_ANNOTATION: str(SCHEMA_VERSION)}, False, id="same"),
        pytest.param({SCHEMA_VERSION_ANNOTATION: str(SCHEMA_VERSION + 1)}, False, id="newer: additive, so it serves"),
        pytest.param({SCHEMA_VERSION_ANNOTATION: str(SCHEMA_VERSION - 1)}, True, id="older prunes our fields"),
        pytest.param({}, True, id="without the annotation"),
        pytest.param(None, True, id="without annotations"),
        pytest.param({SCHEMA_VERSION_ANNOTATION: "latest"}, True, id="no number"),
        pytest.param({SCHEMA_VERSION_ANNOTATION: "-1"}, True, id="negative"),
    ],
)
def test_outdated_crd_is_recognised(annotations: dict[str, str] | None, outdated: bool) -> None:
    assert schema_is_outdated(annotations) is outdated


@kinds
def test_crd_carries_the_schema_version(kind: Kind) -> None:
    assert not schema_is_outdated(build_crd(kind)["metadata"]["annotations"])


def test_schema_version_counts_the_fields() -> None:
    """A field that is added needs a new SCHEMA_VERSION: else an operator that needs it trusts a CRD without it.

    Each version has its list in field_lists/. To add a field: raise SCHEMA_VERSION and write the new
    list with `python -m tests.unit.crds.fields`.
    """
    from tests.unit.crds.fields import field_paths, recorded

    assert field_paths() == recorded(SCHEMA_VERSION)
    for version in range(1, SCHEMA_VERSION):
        gone = set(recorded(version)) - set(recorded(SCHEMA_VERSION))
        assert not gone, f"fields of version {version} are gone; stored objects may hold them"
