"""Simulated accelerator nodes: what they look like and how a second `up` changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.errors import InvalidArgument
from omni_cluster.kwok import NodeClass, build_nodes, parse_class, plan_nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvidia.com/gpu=4x8", NodeClass("nvidia.com/gpu", 4, 8)),
        ("nvidia.com/gpu=4:2", NodeClass("nvidia.com/gpu", 4, 2)),
        ("huawei.com/Ascend910=1", NodeClass("huawei.com/Ascend910", 1, 8)),
    ],
)
def test_short_form(text, expected):
    assert parse_class(text) == (expected,)


def test_file_form(tmp_path: Path):
    file = tmp_path / "nodes.yaml"
    file.write_text("- {resource: amd.com/gpu, count: 2, devices: 4, labels: {pool: a}, zone: z}\n")
    assert parse_class(str(file)) == (NodeClass("amd.com/gpu", 2, 4, {"pool": "a"}, zone="z"),)


@pytest.mark.parametrize("text", ["gpu=4", "nvidia.com/gpu", "nvidia.com/gpu=x8", "nvidia.com/gpu=4x8x2"])
def test_nonsense_names_the_flag_and_the_fix(text):
    with pytest.raises(InvalidArgument, match=r"--kwok-nodes: .* write e\.g\. nvidia\.com/gpu=4x8"):
        parse_class(text)


def test_a_file_with_an_unknown_field_names_the_entry(tmp_path: Path):
    file = tmp_path / "nodes.yaml"
    file.write_text("- {resource: a/b, count: 1}\n- {resource: a/b, cuont: 1}\n")
    with pytest.raises(InvalidArgument, match=r"\[1\]"):
        parse_class(str(file))


def test_nodes_advertise_devices_and_keep_other_pods_away():
    nodes = build_nodes((NodeClass("nvidia.com/gpu", 2, 8), NodeClass("nvidia.com/gpu", 1, 4, {"pool": "small"})))
    assert [node["metadata"]["name"] for node in nodes] == [f"kwok-nvidia-gpu-{n}" for n in range(3)]
    first, last = nodes[0], nodes[2]
    assert first["status"]["capacity"]["nvidia.com/gpu"] == first["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert first["spec"]["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    assert first["metadata"]["annotations"] == {"kwok.x-k8s.io/node": "fake"}
    assert last["metadata"]["labels"]["nvidia.com/gpu.count"] == "4"
    assert last["metadata"]["labels"]["pool"] == "small"


def test_plan_creates_replaces_and_deletes():
    two, changed = build_nodes((NodeClass("a/b", 2, 8),)), build_nodes((NodeClass("a/b", 1, 4),))
    existing = {node["metadata"]["name"]: node for node in two}
    assert [(action, n["metadata"]["name"]) for action, n in plan_nodes(two, {})] == [
        ("create", "kwok-a-b-0"), ("create", "kwok-a-b-1"),
    ]  # fmt: skip
    assert list(plan_nodes(two, existing)) == []
    assert [(action, n["metadata"]["name"]) for action, n in plan_nodes(changed, existing)] == [
        ("delete", "kwok-a-b-1"), ("delete", "kwok-a-b-0"), ("create", "kwok-a-b-0"),
    ]  # fmt: skip
