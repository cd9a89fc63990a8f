"""How much smaller the weights of linear layers are under a quantization scheme. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_operator.placement.modelfacts import dtype_bytes

# Bits per weight, with scales and zero points at the group size in parentheses.
_BITS = {
    "fp8": 8.0,
    "int8": 8.0,
    "w8a8": 8.0,
    "bitsandbytes8": 8.1,
    "awq": 4.25,  # 128
    "gptq": 4.25,
    "int4": 4.25,
    "w4a16": 4.25,
    "bitsandbytes": 4.13,  # nf4 with doubly quantized scales
    "mxfp4": 4.25,  # 32
    "nvfp4": 4.5,  # 16
}


def weight_factor(quantization: Mapping[str, Any], dtype: str) -> tuple[float, str]:
    """(bytes of a quantized weight / bytes of a plain one, note for the source). Raises KeyError for an unknown dtype."""
    method = str(quantization.get("quant_method") or "").lower()
    if not method:
        return 1.0, ""
    bits = quantization.get("bits") or quantization.get("weight_bits") or _compressed_bits(quantization)
    if method == "bitsandbytes" and quantization.get("load_in_8bit"):
        method = "bitsandbytes8"
    if bits:
        size = float(bits) + (0.25 if float(bits) < 8 else 0.0)
    elif method in _BITS:
        size = _BITS[method]
    else:
        return 1.0, f", quantization {method} (unknown here: counted as {dtype})"
    return size / (8 * dtype_bytes(dtype)), f", {method} at {size:g} bits per weight"


def named_factor(name: str, dtype: str) -> float | None:
    """Of vLLM's `quantization` argument, which quantizes while loading; None where the name says no size."""
    bits = next((size for scheme, size in _BITS.items() if scheme in name.lower()), None)  # awq_marlin, fp8_per_block
    return None if bits is None else bits / (8 * dtype_bytes(dtype))


def _compressed_bits(quantization: Mapping[str, Any]) -> Any:
    """compressed-tensors keeps the width inside of its groups; the widest one counts."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    found = [(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, Mapping)]
    return max((b for b in found if b), default=None)
