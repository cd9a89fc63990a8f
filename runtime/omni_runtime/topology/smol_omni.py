"""smol_omni: real speech on two CPU cores. SmolLM2 writes, hibari speaks."""

from __future__ import annotations

from omni_runtime.topology.types import (
    ChunkDefaults,
    EdgeTemplate,
    EngineKind,
    Modality,
    PayloadContract,
    StageTemplate,
    Topology,
)

SMOL_OMNI = Topology(
    name="smol_omni",
    description="SmolLM2-135M thinker on vLLM, hibari acoustic net, hibari vocoder; text in, text and speech out",
    stages=(
        StageTemplate(
            name="thinker",
            engine=EngineKind.AR_VLLM,
            emits=(Modality.TEXT,),
            max_concurrency=8,
            cpu="300m",
            memory="4Gi",
            shared_memory="64Mi",
            engine_args=(
                ("enforce_eager", "true"),  # graph capture costs minutes of start-up and gains nothing at this size
                ("kv_cache_memory_bytes", "268435456"),
                ("max_model_len", "2048"),
            ),
        ),
        StageTemplate(
            name="talker",
            engine=EngineKind.HIBARI_ACOUSTIC,
            max_concurrency=8,
            cpu="100m",
            memory="1Gi",
            shared_memory="64Mi",
        ),
        StageTemplate(
            name="code2wav",
            engine=EngineKind.HIBARI_VOCODER,
            emits=(Modality.AUDIO,),
            max_concurrency=8,
            cpu="100m",
            memory="1Gi",
            shared_memory="64Mi",
        ),
    ),
    edges=(
        EdgeTemplate(source="thinker", to="talker", payload=PayloadContract.TEXT_SEGMENTS),
        EdgeTemplate(
            source="talker",
            to="code2wav",
            payload=PayloadContract.ACOUSTIC_FRAMES,
            chunk=ChunkDefaults(initial_frames=24, frames=96, left_context_frames=0),
        ),
    ),
)
