"""Bytes of the KV cache on one device: grouped-query, latent, sliding-window and recurrent layers. Pure."""

from __future__ import annotations

import math

from omni_operator.placement.modelfacts import AttentionKind, LayerGroup, ModelPart

BLOCK_TOKENS = 16  # vLLM's default; a request holds whole blocks


def bytes_per_token(part: ModelPart, *, element: float, tensor: int = 1, pipeline: int = 1) -> int:
    """What one more position of a long request adds on the busiest device. Sliding and recurrent layers add nothing."""
    return math.ceil(
        sum(
            _positions_bytes(group, element, tensor) * group.count
            for group in part.layers
            if group.kind in (AttentionKind.FULL, AttentionKind.LATENT)
        )
        / _stages(part, pipeline)
    )


def bytes_per_request(
    part: ModelPart, tokens: int, *, element: float, tensor: int = 1, pipeline: int = 1, batched_tokens: int = 0
) -> int:
    """One request of `tokens` positions on the busiest device.

    A sliding layer keeps its window and what one step adds to it (`batched_tokens`), but never more than the request.
    """
    total = 0.0
    for group in part.layers:
        if group.kind is AttentionKind.RECURRENT:
            total += group.count * group.state_elements * element / tensor
            continue
        kept = min(tokens, group.window + batched_tokens) if group.kind is AttentionKind.SLIDING else tokens
        blocks = math.ceil(kept / BLOCK_TOKENS)
        total += group.count * blocks * BLOCK_TOKENS * _positions_bytes(group, element, tensor)
    return math.ceil(total / _stages(part, pipeline))


def _positions_bytes(group: LayerGroup, element: float, tensor: int) -> float:
    """One position of one layer on one rank. Heads that are fewer than the ranks are copied, not cut."""
    if group.kind is AttentionKind.LATENT:
        return group.latent_dim * element  # no heads to split: every rank holds all of it
    heads = max(1, math.ceil(group.kv_heads / tensor))
    return heads * (group.head_dim + (group.value_dim or group.head_dim)) * element


def _stages(part: ModelPart, pipeline: int) -> float:
    """Layers are dealt out to pipeline ranks; the busiest has the rounded-up share."""
    layers = part.attention_layers
    return layers / math.ceil(layers / pipeline) if layers else 1.0
