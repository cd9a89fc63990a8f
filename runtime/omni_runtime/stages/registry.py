"""Which class runs which EngineKind. Imported lazily, so that a stage process loads only its own libraries:
a hibari stage never sees torch, the talker never sees vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import StageEngine
from omni_runtime.topology.types import EngineKind

ENGINES: dict[EngineKind, str] = {
    EngineKind.AR_VLLM: "omni_runtime.stages.ar_vllm.engine:ArVllmEngine",
    EngineKind.HIBARI_ACOUSTIC: "omni_runtime.stages.hibari.acoustic:HibariAcousticEngine",
    EngineKind.HIBARI_VOCODER: "omni_runtime.stages.hibari.vocoder:HibariVocoderEngine",
    EngineKind.QWEN3_OMNI_TALKER: "omni_runtime.stages.qwen3_omni.talker:Qwen3OmniTalkerEngine",
    EngineKind.QWEN3_OMNI_CODE2WAV: "omni_runtime.stages.qwen3_omni.code2wav:Qwen3OmniCode2WavEngine",
}


def build_engine(context: EngineContext) -> StageEngine:
    """The engine of a stage, not loaded yet. Raises InvalidPipeline for options that it does not have."""
    module, _, name = ENGINES[context.stage.engine].partition(":")
    factory = getattr(import_module(module), name)
    return cast("StageEngine", factory(context))
