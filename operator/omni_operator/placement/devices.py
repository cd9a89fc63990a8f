"""Device classes as data: memory, resource name, fabric, slices, dtypes. One table; a platform team extends it.

An OmniRuntimeProfile names the classes that exist in a cluster (`deviceClasses`); `Catalogue.of(profiles)` takes its
facts first and fills in what it does not say from `BUILT_IN`, by the class's name or by the product that its node
selector asks for. `usable` is what a process can allocate: less than what the data sheet says, because firmware,
ECC and the driver keep some; figures marked "estimate" were not read from a running machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor, DeviceClass, OmniRuntimeProfile
from omni_operator.placement.modelfacts import GIB
from omni_runtime.deploy.quantity import parse_quantity

# Of a device that nobody has described, a process gets this share.
UNKNOWN_USABLE = 0.97
HALF = frozenset({"bfloat16", "float16", "float32"})
WITH_INT8 = HALF | {"int8"}
WITH_FP8 = WITH_INT8 | {"fp8"}
WITH_FP4 = WITH_FP8 | {"fp4"}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One class of device. Bytes; `products` are values of the vendor's product label on nodes."""

    name: str
    vendor: AcceleratorVendor
    resource_name: str | None
    memory: int
    usable: int
    dtypes: frozenset[str]
    fabric: str = "PCIe"  # what joins the devices of one node
    products: tuple[str, ...] = ()
    slices: Mapping[str, float] | None = None  # profile -> GiB that a process can allocate
    per_node: int = 8  # devices of the usual machine, for node shapes that have to be made up
    node_selector: Mapping[str, str] | None = None
    source: str = ""

    def supports(self, dtype: str) -> bool:
        families = (("fp8", "fp8"), ("float8", "fp8"), ("int8", "int8"))
        family = "fp4" if "fp4" in dtype else next((f for word, f in families if dtype.startswith(word)), dtype)
        return family in self.dtypes


_A100_40 = {"1g.5gb": 4.75, "1g.10gb": 9.75, "2g.10gb": 9.75, "3g.20gb": 19.6, "4g.20gb": 19.6, "7g.40gb": 39.4}
_80 = {"1g.10gb": 9.5, "1g.20gb": 19.6, "2g.20gb": 19.6, "3g.40gb": 39.4, "4g.40gb": 39.4, "7g.80gb": 79.1}
_H200 = {"1g.18gb": 16.0, "1g.35gb": 32.5, "2g.35gb": 32.5, "3g.71gb": 69.5, "4g.71gb": 69.5, "7g.141gb": 139.7}
_B200 = {"1g.23gb": 21.5, "1g.45gb": 44.0, "2g.45gb": 44.0, "3g.90gb": 89.0, "4g.90gb": 89.0, "7g.180gb": 178.3}
_LOG, _SMI = "total of the framework on a running machine", "nvidia-smi less the driver's context, estimate"
_NVIDIA, _AMD = AcceleratorVendor.NVIDIA, AcceleratorVendor.AMD
_GPU, _ROCM = "nvidia.com/gpu", "amd.com/gpu"


def _gib(value: float) -> int:
    return int(value * GIB)


BUILT_IN: tuple[DeviceSpec, ...] = (
    DeviceSpec("nvidia-a100-40gb", _NVIDIA, _GPU, _gib(40), _gib(39.4), WITH_INT8, "NVLink",
               ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"), _A100_40, source=_LOG),
    DeviceSpec("nvidia-a100-80gb", _NVIDIA, _GPU, _gib(80), _gib(79.1), WITH_INT8, "NVLink",
               ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"), _80, source=_LOG),
    DeviceSpec("nvidia-h100-80gb", _NVIDIA, _GPU, _gib(80), _gib(79.1), WITH_FP8, "NVLink",
               ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"), _80, source=_LOG),
    DeviceSpec("nvidia-h200", _NVIDIA, _GPU, _gib(141), _gib(139.7), WITH_FP8, "NVLink",
               ("NVIDIA-H200", "NVIDIA-H200-NVL"), _H200, source=_LOG),
    DeviceSpec("nvidia-b200", _NVIDIA, _GPU, _gib(180), _gib(178.3), WITH_FP4, "NVLink",
               ("NVIDIA-B200",), _B200, source=_SMI),
    DeviceSpec("nvidia-l4", _NVIDIA, _GPU, _gib(24), _gib(22.0), WITH_FP8, "PCIe", ("NVIDIA-L4",), per_node=4, source=_SMI),
    DeviceSpec("nvidia-l40s", _NVIDIA, _GPU, _gib(48), _gib(44.4), WITH_FP8, "PCIe", ("NVIDIA-L40S",), source=_SMI),
    DeviceSpec("nvidia-rtx-4090", _NVIDIA, _GPU, _gib(24), _gib(23.5), WITH_FP8, "PCIe",
               ("NVIDIA-GeForce-RTX-4090",), per_node=2, source=_LOG),
    DeviceSpec("amd-mi250x", _AMD, _ROCM, _gib(64), _gib(63.9), WITH_INT8, "XGMI",
               ("AMD_Instinct_MI250X", "AMD_INSTINCT_MI250X"), source="one die, estimate"),
    DeviceSpec("amd-mi300x", _AMD, _ROCM, _gib(192), _gib(191.5), WITH_FP8, "XGMI",
               ("AMD_Instinct_MI300X_OAM", "AMD_Instinct_MI300X"), source="estimate"),
    DeviceSpec("amd-mi325x", _AMD, _ROCM, _gib(256), _gib(255.5), WITH_FP8, "XGMI",
               ("AMD_Instinct_MI325X_OAM", "AMD_Instinct_MI325X"), source="estimate"),
    DeviceSpec("ascend-910b", AcceleratorVendor.ASCEND, "huawei.com/Ascend910B", _gib(64), _gib(61.2), WITH_INT8, "HCCS",
               ("Ascend910B", "910B1", "910B2", "910B3", "910B4-1"), source=_LOG),
    DeviceSpec("ascend-910c", AcceleratorVendor.ASCEND, "huawei.com/Ascend910C", _gib(64), _gib(61.2), WITH_INT8, "HCCS",
               ("Ascend910C", "910C", "Ascend910_9382"), per_node=16, source="one die, as 910B"),
    DeviceSpec("intel-gaudi3", AcceleratorVendor.INTEL, "habana.ai/gaudi", _gib(128), _gib(126.0), WITH_FP8, "Ethernet",
               ("gaudi3", "Gaudi3"), source="estimate"),
    DeviceSpec("intel-max-1550", AcceleratorVendor.INTEL, "gpu.intel.com/i915", _gib(128), _gib(122.0), WITH_INT8, "Xe Link",
               ("Max_1550",), source="two tiles of 64 GB, estimate"),
    DeviceSpec("musa-s4000", AcceleratorVendor.MOORE_THREADS, "mthreads.com/gpu", _gib(48), _gib(46.5), WITH_INT8, "MTLink",
               ("MTT_S4000", "MTT-S4000"), source="estimate"),
    DeviceSpec("cpu", AcceleratorVendor.CPU, None, 0, 0, HALF | {"int8"}, "none", source="resources.memory of the stage"),
)  # fmt: skip

_BY_NAME = {d.name: d for d in BUILT_IN}
_BY_PRODUCT = {product: d for d in BUILT_IN for product in d.products}
# Labels whose value is the product's name, per vendor.
PRODUCT_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "node.kubernetes.io/npu.chip.name",
    "gpu.intel.com/product",
    "habana.ai/product",
    "mthreads.com/gpu.product",
)
_MIG = re.compile(r"nvidia\.com/mig-(?P<profile>[0-9]+g\.(?P<gb>[0-9]+)gb)(\.me)?")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Device classes of the profiles in a cluster; `BUILT_IN` for what they do not say."""

    classes: Mapping[tuple[str, str], DeviceSpec]  # (profile, class) -> device

    @classmethod
    def of(cls, profiles: Mapping[str, OmniRuntimeProfile]) -> Catalogue:
        return cls(
            {
                (name, device.name): describe(device, profile.spec.vendor, _selector(profile, device))
                for name, profile in profiles.items()
                for device in profile.spec.device_classes
            }
        )

    def device(self, profile: str, name: str) -> DeviceSpec | None:
        return self.classes.get((profile, name)) or _BY_NAME.get(name)

    def others(self, profile: str) -> Iterable[DeviceSpec]:
        """The classes of a profile, for the advice to take another one."""
        return (device for (owner, _), device in self.classes.items() if owner == profile)


def describe(device: DeviceClass, vendor: AcceleratorVendor, selector: Mapping[str, str]) -> DeviceSpec:
    """A class of a profile: what it says itself, completed from the table."""
    memory = int(parse_quantity(device.memory))
    known = _BY_NAME.get(device.name) or next(
        (_BY_PRODUCT[v] for k, v in selector.items() if k in PRODUCT_LABELS and v in _BY_PRODUCT), None
    )
    slice_bytes = slice_memory(device.resource_name or "", known)
    if slice_bytes is not None:
        usable, source = min(slice_bytes, memory), f"slice {device.resource_name}"
    elif known is not None and known.memory:
        usable, source = min(memory, int(known.usable * memory / known.memory)), known.source
    else:
        usable, source = int(memory * UNKNOWN_USABLE), f"{UNKNOWN_USABLE:.0%} of the profile's memory"
    if device.usable_memory is not None:
        usable, source = int(parse_quantity(device.usable_memory)), "usableMemory of the profile"
    base = known or DeviceSpec(device.name, vendor, device.resource_name, memory, usable, WITH_INT8)
    dtypes = base.dtypes if device.number_types is None else frozenset(t.value for t in device.number_types)
    return replace(
        base,
        name=device.name,
        vendor=vendor,
        resource_name=device.resource_name,
        memory=memory,
        usable=usable,
        dtypes=dtypes,
        node_selector=dict(selector),
        source=source,
    )


def slice_memory(resource: str, board: DeviceSpec | None = None) -> int | None:
    """Bytes that a process can allocate in a MIG slice of this resource name; None where it is no slice."""
    match = _MIG.fullmatch(resource)
    if match is None:
        return None
    table = (board.slices if board else None) or {}
    stated = table.get(match["profile"])
    return _gib(stated) if stated is not None else int(int(match["gb"]) * 0.95 * GIB)


def by_product(product: str) -> DeviceSpec | None:
    """The class of a product label's value; time-sliced devices carry a suffix."""
    return _BY_PRODUCT.get(product.removesuffix("-SHARED"))


def _selector(profile: OmniRuntimeProfile, device: DeviceClass) -> dict[str, str]:
    general = profile.spec.scheduling.node_selector if profile.spec.scheduling else None
    return {**(general or {}), **(device.node_selector or {})}
