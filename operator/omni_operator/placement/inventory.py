"""What the accelerators of a node are, from its labels and allocatable resources. Pure.

Understood: NVIDIA GPU feature discovery (also MIG, strategies single and mixed, and time slicing), AMD's node labeller,
Ascend's device plugin, Intel's GPU plugin and Gaudi; and the memory that a ResourceSlice states (`dra`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from omni_operator.placement.devices import BUILT_IN, PRODUCT_LABELS, by_product, slice_memory
from omni_operator.placement.types import NodeView

MIB = 1 << 20
_RESOURCES = {d.resource_name for d in BUILT_IN if d.resource_name}
_VRAM = re.compile(r"([0-9]+)\s*(G|Gi|GB|M|Mi|MB)?")


@dataclass(frozen=True, slots=True)
class DeviceInventory:
    """The devices of one resource on one node. memory: bytes of one device, None where nothing says it."""

    resource_name: str
    count: int
    product: str = ""
    memory: int | None = None
    device_class: str | None = None  # of the built-in table
    shared_by: int = 1  # time slicing: so many "devices" are one
    source: str = ""


def tells_devices(label: str) -> bool:
    """Whether a label says something about a node's devices."""
    return (
        label in PRODUCT_LABELS
        or label in ("nvidia.com/gpu.memory", "nvidia.com/gpu.replicas", "amd.com/gpu.vram", "beta.amd.com/gpu.vram")
        or label.startswith("beta.amd.com/gpu.vram.")
        or (label.startswith("nvidia.com/mig-") and label.endswith(".memory"))
    )


def node_inventory(node: NodeView) -> tuple[DeviceInventory, ...]:
    """Accelerators of a node, by resource name."""
    found = []
    for resource, count in sorted(node.allocatable.items()):
        if resource in _RESOURCES or resource.startswith("nvidia.com/mig-"):
            found.append(_inventory(node, resource, count))
    return tuple(found)


def device_memory(node: NodeView, resource: str) -> int | None:
    """Bytes of one device of this resource, where the node's labels, its product or its ResourceSlices say so."""
    return _inventory(node, resource, node.allocatable.get(resource, 0)).memory


def _inventory(node: NodeView, resource: str, count: int) -> DeviceInventory:
    labels = node.labels
    product = next((labels[k] for k in PRODUCT_LABELS if k in labels), "")
    known = by_product(product)
    if known is not None and known.resource_name != resource and not resource.startswith("nvidia.com/mig-"):
        known = None  # another vendor's label on the same node
    slice_bytes = slice_memory(resource, known)
    stated = _stated_memory(labels, resource)
    name = known.name if known and slice_bytes is None else None
    if slice_bytes is not None:
        memory: int | None = slice_bytes
        source = "MIG profile of the resource name"
    elif "-MIG-" in product:  # strategy single: the resource is nvidia.com/gpu, and each is a slice
        profile = product.rpartition("-MIG-")[2]
        memory, source = slice_memory(f"nvidia.com/mig-{profile}"), "MIG profile of the product label"
    elif stated is not None:
        memory, source = stated, "memory label"
    elif resource in node.memories:
        memory, source = node.memories[resource], "ResourceSlice"
    elif known is not None:
        memory, source = known.memory, "product label"
    else:
        memory, source = None, ""
    replicas = _positive(labels.get("nvidia.com/gpu.replicas")) if resource == "nvidia.com/gpu" else 1
    return DeviceInventory(resource, count, product, memory, name, max(1, replicas), source)


def _stated_memory(labels: Mapping[str, str], resource: str) -> int | None:
    """Of the labels that say it in so many words. NVIDIA counts MiB; AMD writes 192G and means GiB."""
    if resource == "nvidia.com/gpu":
        megabytes = _positive(labels.get("nvidia.com/gpu.memory"))
        return megabytes * MIB if megabytes else None
    if resource.startswith("nvidia.com/mig-"):
        megabytes = _positive(labels.get(f"{resource}.memory"))
        return megabytes * MIB if megabytes else None
    if resource == "amd.com/gpu":
        text = labels.get("amd.com/gpu.vram") or labels.get("beta.amd.com/gpu.vram") or _counted_vram(labels)
        match = _VRAM.fullmatch(text or "")
        if match:
            return int(match[1]) * (MIB if (match[2] or "G").startswith("M") else 1 << 30)
    return None


def _counted_vram(labels: Mapping[str, str]) -> str | None:
    """The labeller's older form has the value in the key: beta.amd.com/gpu.vram.64G: "8"."""
    prefix = "beta.amd.com/gpu.vram."
    return next((k.removeprefix(prefix) for k in sorted(labels) if k.startswith(prefix)), None)


def _positive(text: str | None) -> int:
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else 0
