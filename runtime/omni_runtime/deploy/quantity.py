"""Kubernetes quantities ("500m", "16Gi") as numbers."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS = {
    "m": Decimal(1) / 1000,
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}


def parse_quantity(text: str) -> Decimal:
    """The plain number: cores, or bytes. Raises ValueError for what is no quantity."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity such as 500m, 2 or 16Gi")
    return Decimal(match[1]) * _FACTORS[match[2] or ""]


def format_bytes(count: int | Decimal) -> str:
    """The smallest whole binary quantity that holds `count` bytes, for advice: 4210688 -> "5Mi"."""
    suffix = next((s for s in ("Gi", "Mi") if count >= 4 * _FACTORS[s]), "Ki")
    return f"{math.ceil(count / _FACTORS[suffix])}{suffix}"
