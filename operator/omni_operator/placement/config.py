"""config.json of a Hugging Face model -> what its weights and its KV cache take. Pure: the mapping is given.

Parameters are counted from shapes, module by module, as the model families that we serve build them. A family that
is not known raises `UnknownModel`; nothing is guessed from a file's size or a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_operator.placement.modelfacts import AttentionKind, LayerGroup, ModelPart, dtype_bytes
from omni_operator.placement.quantization import weight_factor

Config = Mapping[str, Any]


class UnknownModel(ValueError):
    """The configuration is not one that the formulas cover; says which field."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of a text decoder."""

    embedding: int
    head: int
    dense: int  # attention and dense feed-forward
    experts: int
    replicated: int  # norms, routers: on every tensor-parallel rank

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.dense + self.experts + self.replicated


def text_part(config: Config, name: str = "model", *, extra_parameters: int = 0, encoder_tokens: int = 0) -> ModelPart:
    """A text decoder from its (text) configuration.

    extra_parameters: encoders and projections that come with it, replicated on every rank. Raises UnknownModel.
    """
    counts = decoder_parameters(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    width = dtype_bytes(dtype)
    quantization = config.get("quantization_config") or {}
    factor, note = weight_factor(quantization, dtype)
    # Embedding and head are left alone by every scheme that is in use.
    outside = counts.embedding + counts.head + counts.replicated + extra_parameters
    inside = counts.dense + counts.experts
    return ModelPart(
        name=name,
        weight_bytes=int((outside + inside * factor) * width),
        source=f"config.json, {counts.total + extra_parameters:,} parameters{note}",
        replicated_bytes=int((counts.replicated + extra_parameters) * width),
        expert_bytes=int(counts.experts * factor * width),
        first_last_bytes=int((counts.embedding + counts.head) * width),
        layers=layer_groups(config),
        hidden=_int(config, "hidden_size"),
        intermediate=_widest(config),
        heads=_int(config, "num_attention_heads"),
        kv_heads=_kv_heads(config),
        vocab=_int(config, "vocab_size"),
        max_positions=int(config.get("max_position_embeddings") or 0),
        dtype=dtype,
        encoder_tokens=encoder_tokens,
    )


def decoder_parameters(config: Config) -> Parameters:
    """Every tensor of the decoder, by shape. Raises UnknownModel where a size is missing."""
    hidden, vocab, layers = (_int(config, k) for k in ("hidden_size", "vocab_size", "num_hidden_layers"))
    attention, attention_norms = _attention(config, hidden)
    sparse = sum(1 for i in range(layers) if _is_sparse(config, i))
    dense_width = int(config.get("intermediate_size") or 0)
    experts, router, shared = _experts(config, hidden)
    dense_layers = layers - sparse
    if dense_layers and not dense_width:
        raise UnknownModel("config.json has dense layers but no intermediate_size")
    norms = 4 if str(config.get("model_type", "")).startswith(("gemma2", "gemma3")) else 2
    tied = bool(config.get("tie_word_embeddings", False))
    return Parameters(
        embedding=vocab * hidden,
        head=0 if tied else vocab * hidden,
        dense=layers * attention + dense_layers * 3 * hidden * dense_width + sparse * shared,
        experts=sparse * experts,
        replicated=layers * (norms * hidden + attention_norms) + sparse * router + hidden,
    )


def layer_groups(config: Config) -> tuple[LayerGroup, ...]:
    """The layers by what they keep of a request: full, sliding, latent and recurrent ones."""
    layers = _int(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        latent = _int(config, "kv_lora_rank") + _int(config, "qk_rope_head_dim")
        return (LayerGroup(layers, AttentionKind.LATENT, latent_dim=latent),)
    heads, dim = _kv_heads(config), _head_dim(config)
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    kinds = [_layer_kind(config, i, window) for i in range(layers)]
    found = []
    for kind in AttentionKind:
        count = kinds.count(kind)
        if not count:
            continue
        if kind is AttentionKind.RECURRENT:
            found.append(LayerGroup(count, kind, state_elements=_state_elements(config)))
        else:
            bound = window if kind is AttentionKind.SLIDING else 0
            found.append(LayerGroup(count, kind, kv_heads=heads, head_dim=dim, window=bound))
    return tuple(found)


def _layer_kind(config: Config, index: int, window: int) -> AttentionKind:
    types = config.get("layer_types")
    if types:
        named = str(types[index])
        if named in ("linear_attention", "mamba", "recurrent", "conv"):
            return AttentionKind.RECURRENT
        return AttentionKind.SLIDING if window and "sliding" in named else AttentionKind.FULL
    interval = config.get("full_attention_interval")
    if interval:  # hybrid models: every n-th layer is attention, the others are linear
        return AttentionKind.FULL if (index + 1) % int(interval) == 0 else AttentionKind.RECURRENT
    pattern = config.get("sliding_window_pattern") or (2 if config.get("model_type") == "gemma2" else None)
    if config.get("model_type") in ("gemma3_text", "gemma3"):
        pattern = pattern or 6
    if not window:
        return AttentionKind.FULL
    if pattern:
        return AttentionKind.FULL if (index + 1) % int(pattern) == 0 else AttentionKind.SLIDING
    # Qwen2: the layers below max_window_layers look at everything.
    below = config.get("max_window_layers")
    if below is not None and index < int(below):
        return AttentionKind.FULL
    return AttentionKind.SLIDING


def _attention(config: Config, hidden: int) -> tuple[int, int]:
    """(parameters that are split over ranks, parameters of its norms) of one layer."""
    heads = _int(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        rank, rope = _int(config, "kv_lora_rank"), _int(config, "qk_rope_head_dim")
        nope, value = _int(config, "qk_nope_head_dim"), _int(config, "v_head_dim")
        query_rank = int(config.get("q_lora_rank") or 0)
        query = (
            hidden * query_rank + query_rank * heads * (nope + rope) if query_rank else hidden * heads * (nope + rope)
        )
        keys = hidden * (rank + rope) + rank * heads * (nope + value)
        return query + keys + heads * value * hidden, rank + query_rank
    dim, kv = _head_dim(config), _kv_heads(config)
    biased = config.get("attention_bias") or config.get("model_type") in ("qwen2", "qwen2_5_omni_text", "qwen2_moe")
    bias = (heads + 2 * kv) * dim if biased else 0
    named = str(config.get("model_type", ""))
    head_norms = 2 * dim if named.startswith(("qwen3", "gemma3")) else 0
    return hidden * heads * dim * 2 + hidden * kv * dim * 2 + bias, head_norms


def _experts(config: Config, hidden: int) -> tuple[int, int, int]:
    """(experts, router, shared expert) of one sparse layer."""
    count = _expert_count(config)
    if not count:
        return 0, 0, 0
    width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
    if not width:
        raise UnknownModel("config.json has experts but neither moe_intermediate_size nor intermediate_size")
    shared_width = int(config.get("shared_expert_intermediate_size") or 0) or width * int(
        config.get("n_shared_experts") or 0
    )
    gate = hidden if config.get("shared_expert_intermediate_size") else 0
    return count * 3 * hidden * width, hidden * count, 3 * hidden * shared_width + gate


def _expert_count(config: Config) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)


def _is_sparse(config: Config, index: int) -> bool:
    if not _expert_count(config):
        return False
    if index < int(config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or ()):
        return False
    step = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    return (index + 1) % step == 0 if config.get("decoder_sparse_step") else index % step == 0


def _widest(config: Config) -> int:
    dense = int(config.get("intermediate_size") or 0)
    count = _expert_count(config)
    if not count:
        return dense
    active = int(config.get("num_experts_per_tok") or 1)
    return active * int(config.get("moe_intermediate_size") or dense)


def _state_elements(config: Config) -> int:
    """Gated delta net and Mamba-2: one matrix per value head, and the tail of a short convolution."""
    heads = int(config.get("linear_num_value_heads") or config.get("mamba_n_heads") or 0)
    keys = int(config.get("linear_key_head_dim") or config.get("mamba_d_state") or 0)
    values = int(config.get("linear_value_head_dim") or config.get("mamba_d_head") or 0)
    if not heads * keys * values:
        raise UnknownModel("config.json has recurrent layers, but their state's sizes are not among the known fields")
    kernel = int(config.get("linear_conv_kernel_dim") or config.get("mamba_d_conv") or 4)
    key_heads = int(config.get("linear_num_key_heads") or heads)
    return heads * keys * values + (kernel - 1) * (2 * key_heads * keys + heads * values)


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 0)


def _head_dim(config: Config) -> int:
    stated = config.get("head_dim")
    return int(stated) if stated else _int(config, "hidden_size") // _int(config, "num_attention_heads")


def _int(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnknownModel(f"config.json has no usable {key}: {value!r}")
    return value
