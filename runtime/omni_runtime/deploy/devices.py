"""One stage against its runtime profile: device class, count, parallelism, memory fraction, node selector. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from omni_crds.v1alpha1.pipeline import AcceleratorSpec, StageSpec
from omni_crds.v1alpha1.runtimeprofile import DeviceClass, OmniRuntimeProfile
from omni_runtime.deploy.overlay import PIPELINE, Origins, Violations, profile_origin, topology_origin
from omni_runtime.deploy.plan import DevicePlan
from omni_runtime.deploy.structure import StageNode
from omni_runtime.topology.engines import ENGINES
from omni_runtime.topology.registry import one_of


@dataclass(frozen=True, slots=True)
class Devices:
    plan: DevicePlan
    tensor: int
    pipeline: int
    node_selector: tuple[tuple[str, str], ...]


def resolve_devices(
    node: StageNode, profile: OmniRuntimeProfile, topology: str, origins: Origins, bad: Violations
) -> Devices | None:
    """What one replica of the stage runs on; None after a complaint about the class."""
    accelerator = node.spec.accelerator if node.spec else None
    device_class = _device_class(node, accelerator, profile, origins, bad)
    if device_class is None:
        return None
    key = f"stages.{node.name}"
    count, tensor, pipeline = _counts(node, accelerator, key, origins, bad)
    stated = accelerator.memory_fraction if accelerator else None
    fraction = origins.pick(
        f"{key}.accelerator.memoryFraction",
        [
            (PIPELINE, None if stated is None else float(stated)),
            (topology_origin(topology), node.template.memory_fraction),
        ],
        node.template.memory_fraction,
    )
    return Devices(
        plan=DevicePlan(device_class.name, count, device_class.resource_name, fraction),
        tensor=tensor,
        pipeline=pipeline,
        node_selector=_node_selector(node.spec, node.path, device_class, profile, bad),
    )


def _device_class(
    node: StageNode,
    accelerator: AcceleratorSpec | None,
    profile: OmniRuntimeProfile,
    origins: Origins,
    bad: Violations,
) -> DeviceClass | None:
    classes = {c.name: c for c in profile.spec.device_classes}
    profile_name = profile.metadata.name
    name = origins.pick(
        f"stages.{node.name}.accelerator.class",
        [
            (PIPELINE, accelerator.class_name if accelerator else None),
            (profile_origin(profile_name), profile.spec.default_device_class or next(iter(classes), None)),
        ],
        "",
    )
    path = f"{node.path}.accelerator.class"
    if name not in classes and accelerator is None:
        problem = f"the default device class of runtime profile {profile_name!r} is not among its device classes"
        bad.add(path, name, problem, f"correct the profile's defaultDeviceClass, or use {one_of(name, classes)}")
    elif name not in classes:
        bad.add(
            path, name, f"runtime profile {profile_name!r} has no such device class", f"use {one_of(name, classes)}"
        )
    return classes.get(name)


def _counts(
    node: StageNode, accelerator: AcceleratorSpec | None, key: str, origins: Origins, bad: Violations
) -> tuple[int, int, int]:
    """(devices, tensor parallel, pipeline parallel) of one replica. All devices that are asked for are used."""
    stated = node.spec.parallelism if node.spec else None
    pipeline = origins.pick(f"{key}.parallelism.pipeline", [(PIPELINE, stated.pipeline if stated else None)], 1)
    asked_tensor = stated.tensor if stated else None
    asked_count = accelerator.count if accelerator else None
    spreads = ENGINES[node.template.engine].parallel
    derived = asked_count // pipeline if asked_count and spreads and asked_count % pipeline == 0 else None
    tensor = origins.pick(
        f"{key}.parallelism.tensor", [(PIPELINE, asked_tensor), (f"{PIPELINE} accelerator.count", derived)], 1
    )
    ways = tensor * pipeline
    count = origins.pick(
        f"{key}.accelerator.count",
        [(PIPELINE, asked_count), (f"{PIPELINE} parallelism", ways if ways > 1 else None)],
        1,
    )
    if not spreads and max(count, ways) > 1:
        stated_ways = "parallelism.tensor" if tensor > 1 else "parallelism.pipeline"
        where = "accelerator.count" if (asked_count or 1) > 1 else stated_ways
        problem = f"engine {node.template.engine} runs on one device"
        bad.add(f"{node.path}.{where}", max(count, ways), problem, "use 1, and raise the stage's replicas instead")
    elif count < ways:
        problem = f"tensor {tensor} x pipeline {pipeline} needs {ways} devices"
        bad.add(f"{node.path}.accelerator.count", count, problem, f"use {ways}, or lower the parallelism")
    elif count % ways:
        problem = f"not divisible by tensor {tensor} x pipeline {pipeline} = {ways}"
        bad.add(f"{node.path}.accelerator.count", count, problem, f"use {ways}")
    elif count > ways:
        problem = f"tensor {tensor} x pipeline {pipeline} uses {ways} devices, and {count - ways} would idle"
        bad.add(
            f"{node.path}.accelerator.count",
            count,
            problem,
            f"use {ways}, or raise parallelism.tensor to {count // pipeline}",
        )
    return count, tensor, pipeline


def _node_selector(
    spec: StageSpec | None, path: str, device_class: DeviceClass, profile: OmniRuntimeProfile, bad: Violations
) -> tuple[tuple[str, str], ...]:
    """Labels of the right nodes: the profile's, the device class's, and the stage's own on top."""
    general = profile.spec.scheduling.node_selector if profile.spec.scheduling else None
    own = spec.scheduling.node_selector if spec and spec.scheduling else None
    device = device_class.node_selector or {}
    for name, value in sorted((own or {}).items()):
        if name in device and device[name] != value:
            bad.add(
                f"{path}.scheduling.nodeSelector[{name}]",
                value,
                f"device class {device_class.name} is on nodes where this label is {device[name]!r}",
                "remove it, or use the device class of those nodes",
            )
    return tuple(sorted({**(general or {}), **device, **(own or {})}.items()))
