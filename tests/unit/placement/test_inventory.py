"""Nodes as device plugins and labellers describe them."""

from __future__ import annotations

from typing import Any

import pytest

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor, DeviceClass
from omni_operator.placement.devices import BUILT_IN, Catalogue, describe, slice_memory
from omni_operator.placement.inventory import device_memory, node_inventory
from omni_operator.placement.types import NodeView
from tests.unit.placement.builders import GIB, catalogue, profiles

MIB = 1 << 20


def node(labels: dict[str, str], **allocatable: int) -> NodeView:
    named = {k.replace("__", "/").replace("_", "."): v for k, v in allocatable.items()}
    return NodeView("n", labels, allocatable=named)


# Labels as the operators of each vendor set them.
GFD = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.family": "hopper",
    "nvidia.com/mig.capable": "true",
    "nvidia.com/mig.strategy": "none",
    "nvidia.com/gpu.replicas": "1",
}
CASES = [
    pytest.param(node(GFD, nvidia_com__gpu=8), "nvidia-h100-80gb", 81559 * MIB, id="NVIDIA GPU feature discovery"),
    pytest.param(
        node({"nvidia.com/gpu.product": "NVIDIA-L4-SHARED", "nvidia.com/gpu.replicas": "4"}, nvidia_com__gpu=16),
        "nvidia-l4",
        24 * GIB,
        id="time slicing",
    ),
    pytest.param(
        node({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "nvidia.com/mig.strategy": "single"}, nvidia_com__gpu=7),
        None,
        slice_memory("nvidia.com/mig-1g.10gb"),
        id="MIG, strategy single",
    ),
    pytest.param(
        node({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}, amd_com__gpu=8),
        "amd-mi300x",
        192 * GIB,
        id="AMD node labeller",
    ),
    pytest.param(node({"beta.amd.com/gpu.vram.64G": "8"}, amd_com__gpu=8), None, 64 * GIB, id="AMD labeller, older form"),
    pytest.param(
        node({"accelerator": "huawei-Ascend910", "node.kubernetes.io/npu.chip.name": "910B3"}, huawei_com__Ascend910B=8),
        "ascend-910b",
        64 * GIB,
        id="Ascend device plugin",
    ),
    pytest.param(node({"gpu.intel.com/product": "Max_1550"}, gpu_intel_com__i915=8), "intel-max-1550", 128 * GIB, id="Intel GPU plugin"),
    pytest.param(node({}, nvidia_com__gpu=8), None, None, id="a plugin without a labeller"),
]  # fmt: skip


@pytest.mark.parametrize(("described", "device_class", "memory"), CASES)
def test_labels(described: NodeView, device_class: str | None, memory: int | None) -> None:
    (found,) = node_inventory(described)
    assert (found.device_class, found.memory) == (device_class, memory)
    assert device_memory(described, found.resource_name) == memory


def test_mixed_mig_has_a_resource_per_profile() -> None:
    labels = {**GFD, "nvidia.com/mig.strategy": "mixed", "nvidia.com/mig-3g.40gb.memory": "40448"}
    described = NodeView(
        "n", labels, allocatable={"nvidia.com/mig-3g.40gb": 2, "nvidia.com/mig-1g.10gb": 1, "cpu": 1000}
    )
    found = {d.resource_name: d for d in node_inventory(described)}
    assert set(found) == {"nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"}
    assert found["nvidia.com/mig-1g.10gb"].memory == slice_memory("nvidia.com/mig-1g.10gb", BUILT_IN[2])
    assert 39 * GIB < (found["nvidia.com/mig-3g.40gb"].memory or 0) < 40 * GIB


def test_a_product_of_another_vendor_says_nothing() -> None:
    assert device_memory(node({"nvidia.com/gpu.product": "NVIDIA-L4"}, amd_com__gpu=8), "amd.com/gpu") is None


# ------------------------------------------------------------------------------------------------ the catalogue
def test_every_class_of_the_chart_is_known_by_name() -> None:
    known = {d.name for d in BUILT_IN}
    for profile in profiles().values():
        for device in profile.spec.device_classes:
            assert device.name in known, device.name
            found = catalogue().device(profile.metadata.name, device.name)
            assert found is not None
            assert found.resource_name == device.resource_name
            if device.resource_name:
                assert 0.9 * found.memory < found.usable <= found.memory


@pytest.mark.parametrize("device", BUILT_IN, ids=lambda d: d.name)
def test_the_table_is_complete(device: Any) -> None:
    assert device.source
    assert device.dtypes
    if device.resource_name is not None:
        assert 0 < device.usable <= device.memory
        assert "bfloat16" in device.dtypes


@pytest.mark.parametrize(
    ("name", "dtype", "supported"),
    [
        ("nvidia-h100-80gb", "fp8", True),
        ("nvidia-h100-80gb", "fp8_e4m3", True),
        ("nvidia-a100-80gb", "fp8", False),
        ("nvidia-a100-80gb", "bfloat16", True),
        ("amd-mi300x", "fp8", True),
        ("amd-mi250x", "fp8", False),
        ("ascend-910b", "fp8", False),
        ("nvidia-b200", "nvfp4", True),
        ("nvidia-h200", "nvfp4", False),
    ],
)
def test_number_types(name: str, dtype: str, supported: bool) -> None:
    assert next(d for d in BUILT_IN if d.name == name).supports(dtype) is supported


def a_class(**fields: Any) -> DeviceClass:
    return DeviceClass.model_validate({"name": "mine", "memory": "80Gi", "resourceName": "nvidia.com/gpu", **fields})


def test_a_profile_extends_the_table() -> None:
    by_label = describe(a_class(), AcceleratorVendor.NVIDIA, {"nvidia.com/gpu.product": "NVIDIA-H200"})
    assert by_label.fabric == "NVLink"
    assert by_label.memory == 80 * GIB
    said = a_class(usableMemory="70Gi", numberTypes=["bfloat16"])
    own = describe(said, AcceleratorVendor.NVIDIA, {})
    assert own.usable == 70 * GIB
    assert own.dtypes == {"bfloat16"}
    unknown = describe(a_class(), AcceleratorVendor.NVIDIA, {})
    assert unknown.usable == int(80 * GIB * 0.97)
    mig = describe(a_class(resourceName="nvidia.com/mig-3g.40gb", memory="40Gi"), AcceleratorVendor.NVIDIA, {})
    assert mig.usable < 40 * GIB


def test_a_class_that_no_profile_has_is_looked_up_in_the_table() -> None:
    assert Catalogue({}).device("any", "nvidia-h100-80gb") is not None
    assert Catalogue({}).device("any", "abacus") is None
