"""Renders the chart with the real helm, if it was built or is on PATH."""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_cluster.paths import current_bin_dir

CHART = Path(__file__).resolve().parents[3] / "charts" / "omni-operator"
Object = dict[str, Any]


class UniqueKeys(yaml.CSafeLoader):  # the CRDs are long, and the pure loader takes seconds for them
    """A key that stands twice is an error; Flux refuses such a manifest and kubectl takes the last one (T21)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def helm() -> str:
    built = current_bin_dir() / "helm"
    found = str(built) if built.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is neither built (omni cluster up) nor on PATH")
    return found


def template(*options: str, release: str = "omni-operator", check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [helm(), "template", release, str(CHART), "--namespace", "omni-system", "--include-crds", *options]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=60)


@lru_cache
def rendered(*options: str, release: str = "omni-operator") -> tuple[Object, ...]:
    """Every object, in the order in which helm prints them."""
    text = template(*options, release=release).stdout
    return tuple(o for o in yaml.load_all(text, Loader=UniqueKeys) if o)


def is_hook(obj: Object) -> bool:
    return "helm.sh/hook" in (obj["metadata"].get("annotations") or {})


def of_kind(objects: tuple[Object, ...], kind: str, *, hooks: bool = False) -> list[Object]:
    return [o for o in objects if o["kind"] == kind and (hooks or not is_hook(o))]
