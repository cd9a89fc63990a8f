"""ResourceSlices and DeviceClasses as drivers and their installers write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DRIVER = "gpu.nvidia.com"
GPU = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
H100 = "NVIDIA H100 80GB HBM3"


def a_device(name: str, memory: str = "81559Mi", kind: str = "gpu", **fields: Any) -> dict[str, Any]:
    attributes = {"productName": {"string": H100}, "type": {"string": kind}, "index": {"int": 0}}
    return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": memory}}, **fields}


def a_slice(
    devices: Sequence[dict[str, Any]], node: str = "n1", generation: int = 1, pool: str = "", name: str = "s"
) -> dict[str, Any]:
    spec = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": pool or node, "generation": generation, "resourceSliceCount": 1},
        "devices": list(devices),
    }
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def a_class(
    *expressions: str,
    name: str = DRIVER,
    resource: str | None = "nvidia.com/gpu",
    created: str = "2026-01-01T00:00:00Z",
) -> dict[str, Any]:
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": text}} for text in expressions or (GPU,)]}
    if resource:
        spec["extendedResourceName"] = resource
    metadata = {"name": name, "creationTimestamp": created}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata, "spec": spec}
