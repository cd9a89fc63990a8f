"""What the memory model knows of a model: values only. Where they come from is in config.py, weights.py and known.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

GIB = 1 << 30

# Bytes of one element. What is not here is unknown, and an unknown dtype is an error, not two bytes.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "int8": 1, "fp4": 0.5, "nvfp4": 0.5, "int4": 0.5,
    "fp8_inc": 1, "fp8_per_token_head": 1.04, "int8_per_token_head": 1.04,  # a float32 beside each head's 128 elements
}  # fmt: skip


class AttentionKind(StrEnum):
    FULL = "full"  # keys and values of every position
    SLIDING = "sliding"  # keys and values of the last `window` positions
    LATENT = "latent"  # MLA: one compressed vector per position, the same on every tensor-parallel rank
    RECURRENT = "recurrent"  # linear attention, Mamba: a state of fixed size per request


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`count` layers that keep the same per position (or per request, if recurrent)."""

    count: int
    kind: AttentionKind = AttentionKind.FULL
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0  # of one head; 0: as head_dim
    window: int = 0
    latent_dim: int = 0  # compressed vector with the rotary part
    state_elements: int = 0  # of one request and layer, before it is split over the ranks


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one replica is spread over its devices. expert: devices that the experts of a layer are dealt out to."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    ulysses: int = 1
    ring: int = 1
    cfg: int = 1
    vae_patch: int = 1

    @property
    def devices(self) -> int:
        """Experts and picture patches use the devices of the others."""
        return self.tensor * self.pipeline * self.data * self.ulysses * self.ring * self.cfg


@dataclass(frozen=True, slots=True)
class Diffusion:
    """What denoising needs beside weights. Sizes in pixels and frames are those of the largest request."""

    hidden: int
    width: int = 1024
    height: int = 1024
    frames: int = 1
    latent_channels: int = 16
    spatial_factor: int = 8  # pixels per latent in each direction
    temporal_factor: int = 4
    patch: int = 2  # latents per token in each direction
    vae_channels: int = 512  # at full resolution, the widest tensor of the decoder
    vae_tile: int = 0  # pixels; 0: the whole picture is decoded at once
    guidance: bool = True  # a second, unconditional pass


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one stage loads. Bytes of weights are totals, before they are split over devices.

    replicated_bytes of them stand on every tensor-parallel rank (norms, routers, small encoders); expert_bytes are
    split by tensor x expert parallelism. first_last_bytes (embedding and head) stand on one pipeline rank.
    """

    name: str
    weight_bytes: int
    source: str
    replicated_bytes: int = 0
    expert_bytes: int = 0
    first_last_bytes: int = 0
    layers: tuple[LayerGroup, ...] = ()
    hidden: int = 0
    intermediate: int = 0  # of the widest feed-forward that one token passes; experts per token times their width
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    max_positions: int = 0
    dtype: str = "bfloat16"
    encoder_tokens: int = 0  # most positions that one image, video or audio takes; its embeddings are cached
    cpu_bytes: int = 0  # of the weights that stay in host memory
    diffusion: Diffusion | None = None

    @property
    def attention_layers(self) -> int:
        return sum(g.count for g in self.layers)

    def scaled(self, factor: float, source: str, dtype: str | None = None) -> ModelPart:
        """The same part in another precision of its weights."""
        return replace(
            self,
            weight_bytes=int(self.weight_bytes * factor),
            replicated_bytes=int(self.replicated_bytes * factor),
            expert_bytes=int(self.expert_bytes * factor),
            first_last_bytes=int(self.first_last_bytes * factor),
            source=source,
            dtype=dtype or self.dtype,
        )


def dtype_bytes(name: str) -> float:
    """Raises KeyError for a dtype that nobody knows the size of."""
    return DTYPE_BYTES[name.removeprefix("torch.")]
