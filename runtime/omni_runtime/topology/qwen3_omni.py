"""qwen3_omni_moe: Qwen3-Omni's thinker, talker and code2wav. Sizes suit the 30B-A3B model; a tiny one overrides them."""

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

QWEN3_OMNI_MOE = Topology(
    name="qwen3_omni_moe",
    description="Qwen3-Omni: thinker on vLLM with the hidden-state tap, talker, code2wav; text, audio and images in",
    stages=(
        StageTemplate(
            name="thinker",
            engine=EngineKind.AR_VLLM,
            emits=(Modality.TEXT,),
            max_concurrency=64,
            cpu="8",
            memory="96Gi",
            shared_memory="2Gi",
            memory_fraction=0.9,
            engine_args=(
                ("enable_prefix_caching", "false"),  # a cache hit computes no rows, and the talker would miss them
                ("max_model_len", "32768"),
            ),
        ),
        StageTemplate(
            name="talker",
            engine=EngineKind.QWEN3_OMNI_TALKER,
            max_concurrency=64,
            cpu="4",
            memory="32Gi",
            shared_memory="1Gi",
            memory_fraction=0.6,
        ),
        StageTemplate(
            name="code2wav",
            engine=EngineKind.QWEN3_OMNI_CODE2WAV,
            emits=(Modality.AUDIO,),
            max_concurrency=64,
            cpu="2",
            memory="16Gi",
            shared_memory="256Mi",
            memory_fraction=0.1,
        ),
    ),
    edges=(
        EdgeTemplate(source="thinker", to="talker", payload=PayloadContract.THINKER_HIDDEN),
        EdgeTemplate(
            source="talker",
            to="code2wav",
            payload=PayloadContract.CODEC_FRAMES,
            # 28 frames of left context cover the decoder's receptive field: streamed PCM equals one-shot to 1e-5.
            chunk=ChunkDefaults(initial_frames=4, frames=25, left_context_frames=28),
        ),
    ),
    inputs=("text", "audio", "image", "video"),
)
