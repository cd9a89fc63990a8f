"""config.json and safetensors headers of a model folder -> what its stages load. Reads the first bytes of files only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_operator.placement.config import UnknownModel, text_part
from omni_operator.placement.known import known_part
from omni_operator.placement.modelfacts import ModelPart
from omni_operator.placement.weights import MAX_HEADER_BYTES, bytes_by_prefix, from_files, parse_safetensors_header
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import FieldError, InvalidPipeline
from omni_runtime.topology.types import EngineKind

# Where the tensors of a stage are, in checkpoints that have several stages in one folder.
PREFIXES: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.AR_VLLM: ("thinker.",),
    EngineKind.QWEN3_OMNI_TALKER: ("talker.", "thinker.model.embed_tokens."),
    EngineKind.QWEN3_OMNI_CODE2WAV: ("code2wav.",),
}


def read_parts(folder: Path, plan: ResolvedPlan) -> dict[str, ModelPart]:
    """Stage -> what it loads, for the stages that the folder tells something about. Raises InvalidPipeline."""
    tensors = read_headers(folder)
    config = read_config(folder)
    found = {}
    for stage in plan.stages:
        known = known_part(plan.model, plan.topology, stage) or _of_config(stage.engine, config, folder)
        if known is None:
            continue
        prefixes = PREFIXES.get(stage.engine, ())
        whole = not bytes_by_prefix(tensors, prefixes)  # a checkpoint of one stage has no prefix
        if not whole or stage.engine is EngineKind.AR_VLLM:
            found[stage.name] = from_files(known, tensors, () if whole else prefixes)
    return found


def _of_config(engine: EngineKind, config: Mapping[str, Any], folder: Path) -> ModelPart | None:
    if engine is not EngineKind.AR_VLLM or not config:
        return None
    text = config.get("text_config") or (config.get("thinker_config") or {}).get("text_config") or config
    try:
        return text_part({**text, "dtype": text.get("dtype") or config.get("dtype") or config.get("torch_dtype")})
    except (UnknownModel, KeyError) as error:
        raise _bad(folder / "config.json", str(error)) from error


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad(path, str(error)) from error
    return content if isinstance(content, dict) else {}


def read_headers(folder: Path) -> dict[str, int]:
    """Tensor -> bytes over all safetensors files of a folder. Raises InvalidPipeline where there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _bad(folder, "the folder has no safetensors file")
    tensors: dict[str, int] = {}
    for path in files:
        try:
            with path.open("rb") as stream:
                start = stream.read(8)
                length = int.from_bytes(start, "little")
                tensors |= parse_safetensors_header(start + stream.read(min(length, MAX_HEADER_BYTES)))
        except (OSError, ValueError) as error:
            raise _bad(path, str(error)) from error
    return tensors


def _bad(path: Path, why: str) -> InvalidPipeline:
    fix = "give the folder that has the model's config.json and safetensors files"
    return InvalidPipeline((FieldError("--model-dir", str(path), why, fix),))
