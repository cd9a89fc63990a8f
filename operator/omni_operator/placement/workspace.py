"""Device memory beside weights and KV cache: activations, graphs, encoder cache, diffusion, runtime. Pure.

Formulas are upper estimates of one step; each term says so and with which numbers. docs/placement.md compares them
with what running engines printed.
"""

from __future__ import annotations

import math

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor
from omni_operator.placement.modelfacts import Diffusion, ModelPart, Parallelism
from omni_operator.placement.types import MemoryTerm

MIB = 1 << 20
DEFAULT_BATCHED_TOKENS = 8192  # vLLM's for a server on devices with more than 70 GiB; 2048 below
SMALL_BATCHED_TOKENS = 2048
SMALL_DEVICE_BYTES = 70 << 30
# Logits in float32, their sorted copy with indices, probabilities and masks: bytes per request and word.
SAMPLER_BYTES = 36
RUNTIME_CONTEXT = {
    AcceleratorVendor.NVIDIA: 620 * MIB,  # context, kernels, cuBLAS workspace
    AcceleratorVendor.AMD: 900 * MIB,
    AcceleratorVendor.ASCEND: 1024 * MIB,
    AcceleratorVendor.INTEL: 1024 * MIB,
    AcceleratorVendor.MOORE_THREADS: 1024 * MIB,
    AcceleratorVendor.CPU: 512 * MIB,  # the process itself: interpreter, framework, tokenizer
}
COLLECTIVES = 1024 * MIB  # NCCL, RCCL, HCCL buffers and the custom all-reduce of one rank
GRAPHS = 640 * MIB  # captured decode graphs of a model with 32 layers at the usual batch sizes
MARGIN = 256 * MIB  # fragments of the allocator


def batched_tokens(arguments: dict[str, str], device_bytes: int) -> int:
    stated = arguments.get("max_num_batched_tokens")
    if stated:
        return int(stated)
    return DEFAULT_BATCHED_TOKENS if device_bytes >= SMALL_DEVICE_BYTES else SMALL_BATCHED_TOKENS


def activation_term(part: ModelPart, parallel: Parallelism, tokens: int, requests: int, width: float) -> MemoryTerm:
    """The peak of one step: residual stream and its copy, plus the larger of feed-forward and sampler."""
    residual = 2 * tokens * part.hidden * width
    feed_forward = 3 * tokens * part.intermediate * width / parallel.tensor
    sampler = requests * part.vocab * SAMPLER_BYTES
    size = math.ceil(residual + max(feed_forward, sampler))
    what = "sampler" if sampler > feed_forward else "feed-forward"
    detail = f"{tokens} tokens x {part.hidden} wide, {what} of {requests} requests"
    return MemoryTerm("activations", size, "estimate of one step", detail)


def graph_term(part: ModelPart, eager: bool) -> MemoryTerm | None:
    if eager:
        return None
    layers = part.attention_layers or 32
    return MemoryTerm("captured graphs", GRAPHS * layers // 32, "estimate", f"{layers} layers; enforce_eager has none")


def encoder_cache_term(part: ModelPart, width: float, tokens: int) -> MemoryTerm | None:
    """Embeddings of images, video and audio that wait for their turn: one item of the largest size at least."""
    if not part.encoder_tokens:
        return None
    kept = max(part.encoder_tokens, tokens)
    size = math.ceil(kept * part.hidden * width)
    return MemoryTerm("encoder cache", size, "largest item of the model", f"{kept} positions x {part.hidden}")


def runtime_terms(vendor: AcceleratorVendor, parallel: Parallelism) -> list[MemoryTerm]:
    terms = [MemoryTerm("runtime context", RUNTIME_CONTEXT[vendor], f"estimate for {vendor.value}")]
    if parallel.devices > 1:
        terms.append(MemoryTerm("collectives", COLLECTIVES, f"estimate for {parallel.devices} ranks"))
    terms.append(MemoryTerm("safety margin", MARGIN, "fixed"))
    return terms


def diffusion_terms(diffusion: Diffusion, parallel: Parallelism, requests: int, width: float) -> list[MemoryTerm]:
    """Latents and activations of the denoiser, and the peak of the VAE's decoder.

    ulysses x ring ranks share the tokens of a sequence; cfg ranks share the two passes; vae_patch ranks the picture.
    """
    columns, rows = diffusion.width // diffusion.spatial_factor, diffusion.height // diffusion.spatial_factor
    frames = (diffusion.frames - 1) // diffusion.temporal_factor + 1
    passes = math.ceil((2 if diffusion.guidance else 1) / parallel.cfg)
    latents = requests * diffusion.latent_channels * frames * columns * rows * 4  # float32, as schedulers keep them
    tokens = frames * (columns // diffusion.patch) * (rows // diffusion.patch)
    shared = math.ceil(tokens / (parallel.ulysses * parallel.ring))
    # Residual, normed copy, query, key, value, attention output, and the feed-forward four times as wide.
    activations = math.ceil(requests * passes * shared * diffusion.hidden * (6 + 4 / parallel.tensor) * width)
    side_w = min(diffusion.width, diffusion.vae_tile or diffusion.width)
    side_h = min(diffusion.height, diffusion.vae_tile or diffusion.height)
    decoded = diffusion.frames if not diffusion.vae_tile else min(diffusion.frames, 4 * diffusion.temporal_factor)
    # The widest tensors of the decoder are at full resolution with a quarter of its channels: input, output, one copy.
    vae = math.ceil(3 * side_w * side_h * decoded * (diffusion.vae_channels // 4) * width / parallel.vae_patch)
    size = f"{diffusion.width} x {diffusion.height}" + (f" x {diffusion.frames} frames" if diffusion.frames > 1 else "")
    return [
        MemoryTerm("latents", latents * 3, "three copies of the scheduler", f"{requests} x {size}"),
        MemoryTerm("activations", activations, "estimate of one denoising step", f"{shared} tokens x {passes} passes"),
        MemoryTerm("VAE decode", vae, "estimate", f"{side_w} x {side_h} at once"),
    ]
