"""The parameter table: what the stages of known models load. For uris whose files nobody here can read.

Counts are of the modules as transformers builds them from each model's published config.json; docs/placement.md has
the comparison with published figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from omni_operator.placement.config import text_part
from omni_operator.placement.modelfacts import AttentionKind, LayerGroup, ModelPart
from omni_runtime.deploy.plan import ModelRef, StagePlan
from omni_runtime.topology.types import EngineKind

Parts = Mapping[EngineKind, ModelPart]

_LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
_LLAMA_70B = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_MIXTRAL = {
    **_LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
_GEMMA3_27B = {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
    "sliding_window": 1024, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN2_5_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
_SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "meta-llama/llama-3.1-8b": _LLAMA_8B,
        "meta-llama/meta-llama-3-8b": {**_LLAMA_8B, "max_position_embeddings": 8192},
        "meta-llama/llama-3.1-70b": _LLAMA_70B,
        "meta-llama/llama-3.3-70b": _LLAMA_70B,
        "mistralai/mixtral-8x7b": _MIXTRAL,
        "qwen/qwen3-30b-a3b": _QWEN3_30B,
        "deepseek-ai/deepseek-v3": _DEEPSEEK_V3,
        "google/gemma-3-27b": _GEMMA3_27B,
    }
)
_QUANTIZED = re.compile(r"awq|gptq|gguf|fp8|fp4|nf4|int[48]|[48]-?bit|w[48]a(4|8|16)|bnb|autoround")
_SUFFIXES = ("-instruct", "-it", "-thinking", "-captioner", "-v0.1", "-instruct-v0.1", "-chat")

_TALKER_LAYERS = (LayerGroup(20, AttentionKind.FULL, kv_heads=2, head_dim=128),)
_TABLE = "parameter table of Qwen3-Omni-30B-A3B"
_AUDIO, _VISION = 647_927_168, 538_631_408
_TOKEN_EMBEDDING = 152_064 * 2048


def _qwen3_omni() -> Parts:
    thinker = text_part(
        {**_QWEN3_30B, "vocab_size": 152_064, "max_position_embeddings": 65_536},
        "thinker",
        extra_parameters=_AUDIO + _VISION,
        encoder_tokens=62_720,
    )
    talker, predictor = 3_324_596_480, 141_570_304
    return {
        EngineKind.AR_VLLM: thinker.scaled(1.0, f"{_TABLE}: thinker 31,719,205,488 parameters"),
        EngineKind.QWEN3_OMNI_TALKER: ModelPart(
            name="talker",
            # The thinker's token embedding comes along: the talker reads its rows.
            weight_bytes=2 * (talker + _TOKEN_EMBEDDING),
            source=f"{_TABLE}: talker {talker:,} parameters and the thinker's token embedding",
            replicated_bytes=2 * predictor,
            layers=_TALKER_LAYERS,
            hidden=1024,
            intermediate=6 * 384,
            heads=16,
            kv_heads=2,
            vocab=3072,
            max_positions=65_536,
        ),
        EngineKind.QWEN3_OMNI_CODE2WAV: ModelPart(
            name="code2wav",
            weight_bytes=2 * 216_016_577,
            source=f"{_TABLE}: code2wav 216,016,577 parameters",
            hidden=1024,
            intermediate=3072,
            heads=16,
            kv_heads=16,
        ),
    }


def _qwen3_omni_tiny() -> Parts:
    """The seeded random model of the repository: 3 MB, whatever is counted."""
    layers = (LayerGroup(4, AttentionKind.FULL, kv_heads=2, head_dim=32),)
    source = "parameter table of qwen3-omni-tiny"
    return {
        kind: ModelPart(kind.value, 4 << 20, source, layers=layers, hidden=128, intermediate=96, heads=4, kv_heads=2,
                        vocab=4096, max_positions=4096, dtype="float32")
        for kind in (EngineKind.AR_VLLM, EngineKind.QWEN3_OMNI_TALKER, EngineKind.QWEN3_OMNI_CODE2WAV)
    }  # fmt: skip


def _smol_omni() -> Parts:
    return {
        EngineKind.AR_VLLM: text_part(_SMOLLM2, "thinker").scaled(1.0, "parameter table of SmolLM2-135M"),
        EngineKind.HIBARI_ACOUSTIC: ModelPart("talker", 120 << 20, "files of hibari-tts"),
        EngineKind.HIBARI_VOCODER: ModelPart("code2wav", 40 << 20, "files of hibari-tts"),
    }


QWEN3_OMNI = _qwen3_omni()
_OF_MODEL: Mapping[str, Parts] = {
    "packaged://qwen3-omni-tiny": _qwen3_omni_tiny(),
    "packaged://smol-omni": _smol_omni(),
}
_OF_TOPOLOGY: Mapping[str, Parts] = {"qwen3_omni_moe": QWEN3_OMNI, "smol_omni": _OF_MODEL["packaged://smol-omni"]}
_QWEN2_5_OMNI_THINKER = text_part(
    _QWEN2_5_7B, "thinker", extra_parameters=639_647_232 + 676_550_144, encoder_tokens=32_768
)


def known_part(model: ModelRef, topology: str, stage: StagePlan) -> ModelPart | None:
    """What the stage loads, by the model's uri; else by the topology, whose table fits the model it is named after."""
    if model.uri in _OF_MODEL:
        return _OF_MODEL[model.uri].get(stage.engine)
    if _QUANTIZED.search(model.uri.lower()):
        return None  # smaller than the table says, and by how much only its files know
    scheme, _, path = model.uri.partition("://")
    if scheme == "hf":
        repository = _base(path)
        if repository.startswith("qwen/qwen3-omni-30b-a3b"):
            return QWEN3_OMNI.get(stage.engine)
        if repository.startswith("qwen/qwen2.5-omni-7b") and stage.engine is EngineKind.AR_VLLM:
            return _QWEN2_5_OMNI_THINKER
        if stage.engine is EngineKind.AR_VLLM and repository in CONFIGS:
            part = text_part(CONFIGS[repository])
            return part.scaled(1.0, f"parameter table of {path}, {part.source.partition(', ')[2]}")
    part_of_topology = _OF_TOPOLOGY.get(topology, {}).get(stage.engine)
    if part_of_topology is None or scheme == "packaged":
        return None
    return part_of_topology.scaled(1.0, f"topology {topology} ({part_of_topology.source})")


def _base(path: str) -> str:
    """organisation/model without the suffix of a variant that has the same shapes."""
    lowered = path.lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        lowered = lowered.removesuffix(suffix)
    return lowered
