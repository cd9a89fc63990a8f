"""Weights: what they take on the busiest device, and what the headers of safetensors files say of them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from omni_operator.placement.modelfacts import ModelPart, Parallelism, dtype_bytes
from omni_operator.placement.quantization import named_factor

MAX_HEADER_BYTES = 100 << 20
_SAFETENSORS_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8, "F4": 0.5, "F8_E8M0": 1,
}  # fmt: skip


def device_bytes(part: ModelPart, parallel: Parallelism) -> int:
    """Bytes on the busiest device.

    Tensor ranks share the linear layers and keep the replicated part whole; pipeline ranks share the layers, and the
    first and the last hold embedding and head; ulysses, ring, cfg and data ranks hold everything once more.
    """
    layers = part.attention_layers
    stages = layers / math.ceil(layers / parallel.pipeline) if layers else parallel.pipeline
    expert_ranks = max(parallel.expert, parallel.tensor)
    dense = part.weight_bytes - part.replicated_bytes - part.expert_bytes - part.first_last_bytes
    layered = dense / parallel.tensor + part.expert_bytes / expert_ranks + part.replicated_bytes
    # With several pipeline ranks the first has the embedding and the last the head: half of both, roughly.
    ends = part.first_last_bytes / parallel.tensor / (1 if parallel.pipeline == 1 else 2)
    return max(0, math.ceil(layered / stages + ends) - part.cpu_bytes)


def with_arguments(part: ModelPart, dtype: str | None, quantization: str | None, offload_gb: float) -> ModelPart:
    """The part as the engine arguments make the engine load it."""
    if dtype and dtype != "auto" and dtype_bytes(dtype) != dtype_bytes(part.dtype):
        factor = dtype_bytes(dtype) / dtype_bytes(part.dtype)
        part = part.scaled(factor, f"{part.source}; loaded as {dtype}", dtype)
    factor_of_scheme = named_factor(quantization or "", part.dtype)
    if factor_of_scheme is not None and "bits per weight" not in part.source:
        whole = part.first_last_bytes + part.replicated_bytes
        small = int((part.weight_bytes - whole) * factor_of_scheme)
        part = replace(
            part,
            weight_bytes=whole + small,
            expert_bytes=int(part.expert_bytes * factor_of_scheme),
            source=f"{part.source}; quantized while loading ({quantization})",
        )
    return replace(part, cpu_bytes=int(offload_gb * (1 << 30))) if offload_gb else part


def parse_safetensors_header(data: bytes) -> dict[str, int]:
    """Tensor name -> bytes, from the first bytes of a file (eight for the header's length, then the header).

    Raises ValueError for what is no safetensors header or is cut short.
    """
    if len(data) < 8:
        raise ValueError("a safetensors file starts with the eight bytes of its header's length")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or len(data) < 8 + length:
        raise ValueError(f"the header has {length} bytes, {len(data) - 8} are here")
    header: Any = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    return {name: _tensor_bytes(name, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor_bytes(name: str, entry: Any) -> int:
    if not isinstance(entry, dict) or entry.get("dtype") not in _SAFETENSORS_BYTES:
        raise ValueError(f"tensor {name} has no dtype that is known: {entry!r:.80}")
    elements = math.prod(int(n) for n in entry.get("shape") or ())
    return math.ceil(elements * _SAFETENSORS_BYTES[entry["dtype"]])


def bytes_by_prefix(tensors: Mapping[str, int], prefixes: Iterable[str]) -> int:
    """Sum over the tensors whose name starts with one of the prefixes; all of them without prefixes."""
    chosen = tuple(prefixes)
    return sum(size for name, size in tensors.items() if not chosen or name.startswith(chosen))


def from_files(part: ModelPart, tensors: Mapping[str, int], prefixes: Iterable[str]) -> ModelPart:
    """The part with the bytes that its files really have; the shares of its kinds of weights stay as counted."""
    total = bytes_by_prefix(tensors, prefixes)
    if not total or not part.weight_bytes:
        return part
    return part.scaled(total / part.weight_bytes, f"safetensors headers, {len(tensors):,} tensors")
