"""What every benchmark prints and writes: a table for a person, one JSON object for `make bench`."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Take it before measuring: the load of the machine is part of the answer."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def report(benchmark: str, described: Mapping[str, Any], figures: Mapping[str, float], file: Path | None) -> None:
    """Figures without a value (NaN: it did not happen) are left out; JSON has no word for them."""
    figures = {name: value for name, value in figures.items() if not math.isnan(value)}
    print(f"\n{'figure':<28}{'value':>12}")
    for name, value in figures.items():
        print(f"{name:<28}{value:>12.3f}")
    if file is not None:
        result = {"benchmark": benchmark, "machine": described, "figures": figures}
        file.write_text(json.dumps(result, indent=2) + "\n")
