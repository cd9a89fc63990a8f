"""What nodes offer through DRA: devices of ResourceSlices that a plain request for an extended resource is served from."""

from __future__ import annotations

from typing import Any

import pytest

from omni_operator.placement.dra import IMPLICIT, Offer, classes_by_resource, offers, read_class, read_slice
from omni_operator.placement.inventory import device_memory
from omni_operator.placement.types import NodeView
from omni_operator.placement.views import cluster_view
from tests.unit.placement.dra_objects import DRIVER, GPU, a_class, a_device, a_slice

MIB = 1 << 20


def offered(slices: list[dict[str, Any]], *classes: dict[str, Any]) -> dict[str, Offer]:
    read = [s for s in map(read_slice, slices) if s is not None]
    return offers(read, classes_by_resource(c for c in map(read_class, classes) if c is not None))


def view_of(slices: list[dict[str, Any]], *classes: dict[str, Any], **allocatable: str) -> NodeView:
    node = {"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "8", **allocatable}}}
    (found,) = cluster_view([node], slices=slices, device_classes=classes).nodes or ()
    return found


def test_devices_of_a_class_count_under_its_resource() -> None:
    node = view_of([a_slice([a_device("gpu-0"), a_device("gpu-1")])], a_class())
    assert node.allocatable["nvidia.com/gpu"] == 2
    assert device_memory(node, "nvidia.com/gpu") == 81559 * MIB


def test_only_the_newest_generation_of_a_pool_counts() -> None:
    """A driver writes the new slices before it removes the old ones."""
    old = a_slice([a_device("gpu-0"), a_device("gpu-1"), a_device("gpu-2")], generation=1)
    new = a_slice([a_device("gpu-0"), a_device("gpu-1")], generation=2)
    assert offered([old, new], a_class())["n1"].counts == {"nvidia.com/gpu": 2}
    moved = a_slice([a_device("gpu-0")], node="n2", pool="n1", generation=3)
    assert offered([old, new, moved], a_class()) == {
        "n2": Offer({"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 81559 * MIB})
    }


def test_parts_of_one_pool_add_up() -> None:
    parts = [a_slice([a_device("gpu-0")], name="a"), a_slice([a_device("gpu-1")], name="b")]
    assert offered(parts, a_class())["n1"].counts == {"nvidia.com/gpu": 2}


@pytest.mark.parametrize(
    ("device", "counts"),
    [
        (a_device("whole"), 1),
        (a_device("slice", kind="mig"), 0),
        (a_device("broken", taints=[{"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}]), 0),
        (a_device("noted", taints=[{"key": "gpu.nvidia.com/xid", "effect": "None"}]), 1),
        (a_device("bare") | {"attributes": {}}, 0),
        (a_device("spelled out") | {"attributes": {"gpu.nvidia.com/type": {"string": "gpu"}}}, 1),
        (a_device("another's") | {"attributes": {"gpu.example.com/type": {"string": "gpu"}}}, 0),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_which_devices_are_of_the_class(device: dict[str, Any], counts: int) -> None:
    assert offered([a_slice([device])], a_class())["n1"].counts.get("nvidia.com/gpu", 0) == counts


@pytest.mark.parametrize(
    ("expressions", "understood"),
    [
        ((GPU,), True),
        (("device.driver == 'gpu.nvidia.com'", 'device.attributes["gpu.nvidia.com"].type == "gpu"'), True),
        ((" device.driver=='gpu.nvidia.com'  ",), True),
        (("device.driver == 'gpu.amd.com'",), False),
        (("device.driver == 'gpu.nvidia.com' || true",), False),
        (("!(device.driver == 'gpu.nvidia.com')",), False),
        (("device.driver == 'gpu.nvidia.com' && device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('9Gi'))",), False),
        (("",), False),
    ],
)  # fmt: skip
def test_a_class_that_is_not_understood_offers_nothing(expressions: tuple[str, ...], understood: bool) -> None:
    """Nobody must be promised a device that the scheduler would not give."""
    assert bool(offered([a_slice([a_device("gpu-0")])], a_class(*expressions))["n1"].counts) is understood


def test_a_class_without_a_resource_has_the_implicit_one() -> None:
    assert offered([a_slice([a_device("d")])], a_class(resource=None))["n1"].counts == {f"{IMPLICIT}{DRIVER}": 1}


def test_of_two_classes_with_one_resource_the_youngest_counts() -> None:
    """As the scheduler chooses; of the same age, the first by name."""
    none = "device.driver == 'nobody'"
    by_age = [a_class(name="a"), a_class(none, name="b", created="2026-02-01T00:00:00Z")]
    assert offered([a_slice([a_device("d")])], *by_age)["n1"].counts == {}
    by_name = [a_class(none, name="b"), a_class(name="a")]
    assert offered([a_slice([a_device("d")])], *by_name)["n1"].counts == {"nvidia.com/gpu": 1}


def test_a_device_plugin_goes_first() -> None:
    node = view_of([a_slice([a_device("gpu-0")])], a_class(), **{"nvidia.com/gpu": "8"})
    assert node.allocatable["nvidia.com/gpu"] == 8


def test_of_unequal_devices_the_smallest_is_what_a_pod_may_get() -> None:
    node = view_of([a_slice([a_device("big"), a_device("small", memory="23034Mi")])], a_class())
    assert device_memory(node, "nvidia.com/gpu") == 23034 * MIB


def test_slices_of_other_things_do_no_harm() -> None:
    pool = {"name": "p", "generation": 1}
    network = {"spec": {"driver": "net", "allNodes": True, "pool": pool, "devices": [{"name": "x"}]}}
    strange = a_slice([a_device("d", memory="1 apple")])
    assert offered([network, {}], a_class()) == {}
    assert offered([strange], a_class())["n1"] == Offer({"nvidia.com/gpu": 1}, {})
