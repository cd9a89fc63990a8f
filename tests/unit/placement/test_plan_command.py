"""`omni plan` with placement: what a person and a script read, exit codes, and where the facts come from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from omni_operator.cli import facts
from omni_operator.cli.plan import DOES_NOT_FIT, INVALID, app
from tests.unit.placement.builders import EXAMPLES, REPOSITORY
from tests.unit.placement.dra_objects import a_class, a_device, a_slice

VALUES = str(REPOSITORY / "charts/omni-operator/values.yaml")


def plan(example: str, *arguments: str, profiles: str | None = VALUES) -> Result:
    chosen = ["--profiles", profiles] if profiles else []
    return CliRunner().invoke(app, ["-f", str(EXAMPLES / f"{example}.pipeline.yaml"), *chosen, *arguments])


def test_a_pipeline_that_fits() -> None:
    result = plan("qwen3-omni", "--nodes", "nvidia-h100-80gb=1x3")
    assert result.exit_code == 0, result.output
    assert "VERDICT feasible: every pod has a place" in result.stdout
    assert "nvidia.com/gpu ●●●" in result.stdout
    assert "weights 30.66" in result.stdout
    assert "COST 3 x nvidia-h100-80gb" in result.stdout


def test_a_pipeline_that_does_not_fit() -> None:
    result = plan("qwen3-omni", "--nodes", "nvidia-h100-80gb=1x2")
    assert result.exit_code == DOES_NOT_FIT
    assert "VERDICT infeasible" in result.stdout
    assert "fix      set parallelism.tensor of thinker to 1" in result.stdout


def test_an_autoscaler_makes_it_a_condition() -> None:
    result = plan("qwen3-omni", "--nodes", "nvidia-h100-80gb=1x2", "--autoscaler")
    assert result.exit_code == 0
    assert "VERDICT feasible if 1 node is added" in result.stdout


def test_without_nodes_memory_alone_is_checked() -> None:
    result = plan("qwen3-omni")
    assert result.exit_code == 0
    assert "no nodes were given" in result.stdout


def test_json_for_scripts() -> None:
    fits = json.loads(plan("qwen3-omni", "--nodes", "nvidia-h100-80gb=1x3", "--json").stdout)["placement"]
    assert fits["verdict"] == "Feasible"
    assert {p["group"] for p in fits["placements"]} == {"thinker", "talker", "entry"}
    thinker = next(m for m in fits["memory"] if m["stage"] == "thinker")
    assert thinker["needBytes"] == sum(t["bytes"] for t in thinker["terms"])
    assert all(t["source"] for t in thinker["terms"])
    result = plan("qwen3-omni", "--nodes", "nvidia-h100-80gb=1x2", "--json")
    fails = json.loads(result.stdout)["placement"]
    assert result.exit_code == DOES_NOT_FIT
    assert (fails["verdict"], fails["constraint"]["kind"], fails["proven"]) == ("Infeasible", "Capacity", True)
    assert fails["fixes"][0]["path"] == "spec.stages[0].parallelism.tensor"
    assert fails["errors"][0]["fix"]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [("h100=2x8", "no device class"), ("nowhere.yaml", "cannot read|No such file"), ("nvidia-l4=2by8", "CLASS=NODESxDEVICES")],
)  # fmt: skip
def test_nodes_that_are_none(nodes: str, words: str) -> None:
    result = plan("qwen3-omni", "--nodes", nodes)
    assert result.exit_code == INVALID
    assert any(word in result.stderr for word in words.split("|")), result.stderr
    assert result.stdout == ""


def a_node(name: str, devices: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
        "status": {"allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(devices)}},
    }


def a_pod(node: str, devices: int) -> dict[str, Any]:
    container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(devices)}}}
    return {"kind": "Pod", "metadata": {"name": "x"}, "spec": {"nodeName": node, "containers": [container]}}


def test_nodes_and_pods_from_a_file(tmp_path: Path) -> None:
    """As `kubectl get nodes,pods -A -o yaml` writes them."""
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "items": [a_node("big", 8), a_pod("big", 6)]}))
    result = plan("qwen3-omni", "--nodes", str(path))
    assert result.exit_code == DOES_NOT_FIT
    assert "have 2 left" in " ".join(result.stdout.split())
    path.write_text(json.dumps({"kind": "NodeList", "items": [a_node("big", 8)]}))
    assert plan("qwen3-omni", "--nodes", str(path)).exit_code == 0


@pytest.mark.parametrize("understood", [True, False])
def test_devices_that_a_dra_driver_offers(tmp_path: Path, understood: bool) -> None:
    """As `kubectl get nodes,resourceslices,deviceclasses -o yaml` writes them: no device plugin, and yet devices."""
    bare = a_node("big", 0)
    slices = a_slice([a_device(f"gpu-{i}") for i in range(3)], node="big")
    chosen = a_class() if understood else a_class("device.driver == 'another'")
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "items": [bare, slices, chosen]}))
    assert plan("qwen3-omni", "--nodes", str(path)).exit_code == (0 if understood else DOES_NOT_FIT)


def test_the_memory_that_a_slice_states_is_what_counts(tmp_path: Path) -> None:
    small = a_slice([a_device(f"gpu-{i}", memory="23034Mi") for i in range(3)], node="big")
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "items": [a_node("big", 0), small, a_class()]}))
    result = plan("qwen3-omni", "--nodes", str(path))
    assert result.exit_code == DOES_NOT_FIT
    assert "the devices of the nodes with the right labels have 22 GiB" in " ".join(result.stdout.split())


def test_the_current_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    values = yaml.safe_load(Path(VALUES).read_text())["profiles"]["cuda"]
    body = {k: v for k, v in values.items() if k not in ("enabled", "image")} | {"images": {"runtime": "x"}}
    objects: dict[str, list[dict[str, Any]]] = {
        "nodes": [a_node("big", 8)],
        "pods": [a_pod("big", 4)],
        "resourcequotas": [
            {"kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"requests.nvidia.com/gpu": "2"}}}
        ],
        "omniruntimeprofiles": [{"metadata": {"name": "cuda"}, "spec": body}],
        "omnitenants": [],
        "resourceslices": [],
        "deviceclasses": [],
    }
    asked: list[tuple[str, ...]] = []

    def kubectl(*words: str, optional: bool = False) -> list[dict[str, Any]]:
        asked.append(words)
        return [
            {"kind": {"nodes": "Node", "pods": "Pod", "resourcequotas": "ResourceQuota"}.get(words[0]), **o}
            for o in objects[words[0]]
        ]

    monkeypatch.setattr(facts, "_kubectl", kubectl)
    result = plan("qwen3-omni", "--cluster", profiles=None)
    assert result.exit_code == DOES_NOT_FIT, result.output
    assert "ResourceQuota q allows 2 x nvidia.com/gpu" in " ".join(result.stdout.split())
    assert ("resourcequotas", "--namespace", "default") in asked


def test_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("nvidia-h100-80gb: 2.5\n")
    assert "3 x nvidia-h100-80gb, 7.50 per hour" in plan("qwen3-omni", "--prices", str(path)).stdout
    path.write_text("- not a table\n")
    assert plan("qwen3-omni", "--prices", str(path)).exit_code == INVALID


def write_safetensors(path: Path, tensors: dict[str, list[int]]) -> None:
    header = json.dumps({n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in tensors.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("price", ["-5", ".nan", ".inf", "[]"])
def test_prices_that_are_none(tmp_path: Path, price: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(f"nvidia-h100-80gb: {price}\n")
    result = plan("qwen3-omni", "--prices", str(path))
    assert result.exit_code == INVALID
    assert "no table of prices" in result.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("profiles: {cpu: 5}", "profiles.cpu: not a mapping"),
        ("profiles: {cpu: {vendor: zz}}", "profiles.cpu: spec.vendor: "),
        ("profiles: [a]", "no OmniRuntimeProfile"),
    ],
)
def test_profiles_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    result = plan("smol-omni", profiles=str(path))
    assert result.exit_code == INVALID
    assert says in result.stderr


@pytest.mark.parametrize(
    "text", ["kind: Node\nmetadata: 5", "kind: Node\nstatus: [1]", "kind: NodeList\nitems: [5, null]"]
)
def test_a_file_of_nodes_that_kubectl_did_not_write(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    result = plan("smol-omni", "--nodes", str(path))
    assert result.exit_code == INVALID
    assert "no Kubernetes object" in result.stderr


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"kind": "Node", "metadata": {"labels": ["a"]}}, "Node 'x'"),
        ({"kind": "Node", "status": {"allocatable": ["cpu"]}}, "Node 'x'"),
        ({"kind": "Node", "spec": {"taints": "gpu"}}, "Node 'x'"),
        ({"kind": "Node", "spec": {"taints": ["gpu"]}}, "Node 'x'"),
        ({"kind": "Node", "status": {"conditions": ["Ready"]}}, "Node 'x'"),
        ({"kind": "Pod", "spec": {"nodeName": "n", "containers": ["c"]}}, "Pod 'x'"),
        ({"kind": "Pod", "spec": {"nodeName": "n", "containers": [{"resources": "much"}]}}, "Pod 'x'"),
        ({"kind": "ResourceQuota", "spec": {"hard": ["pods"]}}, "ResourceQuota 'x'"),
        ({"kind": "ResourceSlice", "spec": {"nodeName": "n", "devices": ["d"]}}, "ResourceSlice 'x'"),
        ({"kind": "ResourceSlice", "spec": {"nodeName": "n", "pool": {"generation": "old"}}}, "ResourceSlice 'x'"),
        ({"kind": "DeviceClass", "spec": {"selectors": ["all"]}}, "DeviceClass 'x'"),
    ],
    ids=str,
)
def test_an_object_of_another_shape_is_named(tmp_path: Path, body: dict[str, Any], named: str) -> None:
    path = tmp_path / "nodes.yaml"
    wrong = {**body, "metadata": {"name": "x", **body.get("metadata", {})}}
    path.write_text(yaml.safe_dump_all([a_node("big", 8), wrong]))
    result = plan("smol-omni", "--nodes", str(path))
    assert result.exit_code == INVALID
    assert f"{named} is not as Kubernetes writes it" in " ".join(result.stderr.split())


def test_labels_that_yaml_reads_as_numbers(tmp_path: Path) -> None:
    node = a_node("big", 8)
    node["metadata"]["labels"] |= {"nvidia.com/gpu.memory": 81559, 1: True}
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(node))
    assert plan("qwen3-omni", "--nodes", str(path)).exit_code == 0


def test_who_names_a_profile_of_a_cluster_learns_where_they_are() -> None:
    result = plan("qwen3-omni", profiles=None)
    assert result.exit_code == INVALID
    assert "--profiles" in result.stderr.splitlines()[-1]
    assert "values.yaml" in result.stderr.splitlines()[-1]


def test_kubectls_own_log_is_left_out() -> None:
    log = 'E1130 03:06:49.045540   18643 memcache.go:265] "Unhandled Error" err="connection refused"'
    assert facts.last_words(f"{log}\n{log}\nThe connection was refused.\n") == "The connection was refused."
    assert facts.last_words(log) == log


def test_weights_from_the_models_own_files(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model-1.safetensors", {"thinker.a": [1 << 15, 1 << 15], "talker.b": [1 << 14, 1 << 15]}
    )
    write_safetensors(tmp_path / "model-2.safetensors", {"code2wav.c": [1 << 12, 1 << 15]})
    result = plan("qwen3-omni", "--model-dir", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    weights = {
        m["stage"]: next(t for t in m["terms"] if t["name"] == "weights") for m in json.loads(result.stdout)["placement"]["memory"]
    }  # fmt: skip
    assert weights["talker"]["bytes"] == pytest.approx(1 << 30, rel=0.01)
    assert weights["code2wav"]["bytes"] == pytest.approx(1 << 28, rel=0.01)
    assert all(w["source"].startswith("safetensors headers") for w in weights.values())


def test_a_model_that_only_its_files_tell_of(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", {"model.embed": [1 << 15, 1 << 16]})
    pipeline = tmp_path / "p.yaml"
    text = (EXAMPLES / "custom.pipeline.yaml").read_text().replace("packaged://smol-omni", "hf://someone/secret")
    text = text.replace("runtimeProfile: cpu", "runtimeProfile: cuda")
    pipeline.write_text(text)
    arguments = ["-f", str(pipeline), "--profiles", VALUES, "--model-dir", str(tmp_path), "--json"]
    answer = json.loads(CliRunner().invoke(app, arguments).stdout)["placement"]
    writer = next(m for m in answer["memory"] if m["stage"] == "writer")
    assert writer["known"]
    assert next(t for t in writer["terms"] if t["name"] == "weights")["bytes"] == pytest.approx(4 << 30, rel=0.01)


def test_a_folder_that_has_no_model(tmp_path: Path) -> None:
    result = plan("qwen3-omni", "--model-dir", str(tmp_path))
    assert result.exit_code == INVALID
    assert "no safetensors file" in result.stderr


def test_processes_of_one_machine_are_not_placed() -> None:
    result = plan("smol-omni", "--local", profiles=None)
    assert result.exit_code == 0
    assert "VERDICT" not in result.stdout
