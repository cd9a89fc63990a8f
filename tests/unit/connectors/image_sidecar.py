"""A sidecar that can import what the image `connector` has, and nothing else of this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

DOCKERFILE = Path(__file__).parents[3] / "runtime_image/Dockerfile.connector"


def modules_of(dockerfile: str) -> frozenset[str]:
    """Top-level modules of the distributions that slim.py leaves and of the sources that are copied."""
    lines = dockerfile.replace("\\\n", " ")
    kept = re.search(r"slim\.py\s+([-\w ]+)\n", lines)
    assert kept is not None
    files = (file.parts[0] for name in kept[1].split() for file in distribution(name).files or ())
    sources = re.findall(r"^COPY \S+ /opt/omni/app/(\w+)$", lines, re.MULTILINE)
    return frozenset({*(file.partition(".")[0] for file in files), *sources})


class Refusal(MetaPathFinder):
    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed | sys.stdlib_module_names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._allowed:
            raise ModuleNotFoundError(f"the image has no {fullname}", name=fullname)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusal(modules_of(DOCKERFILE.read_text())))
    from omni_runtime.connectors.sidecar import main

    sys.exit(main())
