"""What the registry says about a model family: stages, edges and the payload contract of each edge. Torch-free."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EngineKind(StrEnum):
    """The engine implementations of this runtime. Values are what `spec.stages[].engine` accepts."""

    AR_VLLM = "ar_vllm"  # autoregressive text on vLLM, with the hidden-state tap where an edge asks for rows
    QWEN3_OMNI_TALKER = "qwen3_omni_talker"  # own slot-KV engine with batched code predictor
    QWEN3_OMNI_CODE2WAV = "qwen3_omni_code2wav"  # batched stateful streaming decode
    HIBARI_ACOUSTIC = "hibari_acoustic"  # text segments -> acoustic frames
    HIBARI_VOCODER = "hibari_vocoder"  # acoustic frames -> PCM


class Modality(StrEnum):
    TEXT = "text"
    AUDIO = "audio"


class PayloadContract(StrEnum):
    """What the rows of an edge are; `protocol.payload` lists the tensors of each.

    The handshake carries it, so that two stages that disagree refuse each other with a reason.
    """

    THINKER_HIDDEN = "thinker_hidden"
    CODEC_FRAMES = "codec_frames"
    TEXT_SEGMENTS = "text_segments"
    ACOUSTIC_FRAMES = "acoustic_frames"
    KV_CACHE = "kv_cache"  # AR -> DiT, prefill -> decode; no engine of the registry speaks it yet


KV_CHUNK_BYTES = 4 << 20  # most of a chunk of kv_cache: it is copied in one go, in the loop of its stage


class ChunkDefaults(msgspec.Struct, frozen=True):
    """In frames of the edge's payload."""

    initial_frames: int
    frames: int
    left_context_frames: int


class StageTemplate(msgspec.Struct, frozen=True):
    name: str
    engine: EngineKind
    emits: tuple[Modality, ...] = ()  # modalities this stage sends to the client
    max_concurrency: int = 8
    cpu: str = "1"
    memory: str = "2Gi"
    shared_memory: str = "256Mi"
    memory_fraction: float = 0.9  # of each device; stages that share a device must sum to at most 1 (T71)
    engine_args: tuple[tuple[str, str], ...] = ()


class EdgeTemplate(msgspec.Struct, frozen=True):
    source: str
    to: str
    payload: PayloadContract
    supports_async_chunk: bool = True
    chunk: ChunkDefaults | None = None  # None: the producer decides how many rows a chunk has


class Topology(msgspec.Struct, frozen=True):
    name: str
    description: str
    stages: tuple[StageTemplate, ...]
    edges: tuple[EdgeTemplate, ...]
    inputs: tuple[str, ...] = ("text",)  # text, audio, image, video

    def stage(self, name: str) -> StageTemplate | None:
        return next((s for s in self.stages if s.name == name), None)
