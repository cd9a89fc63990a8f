"""The model folders that this distribution can make by itself, without a download. Torch-free: builders load lazily.

`packaged://NAME` in a pipeline's `model.uri` means one of these, prepared under `<models-dir>/NAME`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from omni_runtime.errors import InvalidRequest

Report = Callable[[str], None]
Builder = Callable[[Path, Report], None]

MARKER = "omni-model.json"  # written last by every builder; a folder without it is not a prepared model


@dataclass(frozen=True, slots=True)
class PackagedModel:
    name: str
    description: str
    topology: str
    builder: str  # "module:function", imported only when the model is built
    version: int = 1  # of what the builder writes; a folder of another one is built again

    def load_builder(self) -> Builder:
        module, _, function = self.builder.partition(":")
        return cast("Builder", getattr(import_module(module), function))


PACKAGED: tuple[PackagedModel, ...] = (
    PackagedModel(
        name="smol-omni",
        description="SmolLM2-135M-Instruct (text) with the hibari voice: real speech on two CPU cores",
        topology="smol_omni",
        builder="omni_runtime.models.smol_omni:build_smol_omni",
    ),
    PackagedModel(
        name="qwen3-omni-tiny",
        description="Qwen3-Omni architecture with seeded random weights (3 MB): proves exactness, says nothing",
        topology="qwen3_omni_moe",
        builder="omni_runtime.models.qwen3_omni_tiny:build_qwen3_omni_tiny",
        version=2,  # the chat template knows video
    ),
)


def packaged_model(name: str) -> PackagedModel:
    for model in PACKAGED:
        if model.name == name:
            return model
    raise InvalidRequest(f"model {name!r} is not packaged; use one of {', '.join(m.name for m in PACKAGED)}")


def is_prepared(name: str, root: Path) -> bool:
    """False also for a folder that an earlier version of the builder wrote."""
    try:
        marker = json.loads((root / name / MARKER).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(marker.get("version", 1) == packaged_model(name).version)


def prepare(name: str, root: Path, report: Report, *, force: bool = False) -> Path:
    """Build a packaged model under `root` once; returns its folder.

    Atomic: the folder appears by one rename, so a crash leaves no half model and two preparers do no harm.
    Files are world-readable because pods run as another user than the one that built the image.
    """
    model = packaged_model(name)
    target = root / name
    if is_prepared(name, root) and not force:
        report(f"{name}: ready in {target}")
        return target
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        model.load_builder()(work, report)
        marker = work / MARKER
        if not marker.is_file():
            raise RuntimeError(f"the builder of {name} wrote no {MARKER}")
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"version": model.version}, indent=2))
        _make_readable(work)
        if target.exists():
            if is_prepared(name, root) and not force:  # another preparer was faster
                return target
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"{name}: ready in {target}")
    return target


def _make_readable(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def default_models_dir() -> Path:
    """`$OMNI_MODELS_DIR`, else `models` in the product's cache folder."""
    if configured := os.environ.get("OMNI_MODELS_DIR"):
        return Path(configured)
    from omni_cluster.paths import cache_dir

    return cache_dir() / "models"
