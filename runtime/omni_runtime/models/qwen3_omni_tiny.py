"""A seeded, random Qwen3-Omni (0.8 M parameters, 3 MB) with tokenizer, processor and chat template.

The architecture is the real one; only the sizes are small. It says nothing, but transformers, vLLM and our stages can
be compared on it number by number. What the sizes must keep to, each of which broke a run:

- every parameter is initialised from its own name: transformers leaves talker experts and routers uninitialised;
- the talker's vocabulary holds the codebook plus 1024 special ids, because the last 1024 ids are suppressed;
- head_dim >= 32 and MoE sizes in multiples of 32, or vLLM's CPU kernels refuse; mrope sections sum to head_dim / 2;
- accept_hidden_layer lies above the deepstack levels: there vLLM's and transformers' hidden states are the same;
- code2wav's last convolution is scaled to a peak of 0.5, or PCM16 would be silence.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

from omni_runtime.models.catalogue import MARKER, Report

SEED = 0
HIDDEN = 64
TEXT_VOCABULARY = 320
CODEBOOK = 64
QUANTIZERS = 4
TALKER_VOCABULARY = CODEBOOK + 1024
MEL_BINS = 16
PEAK = 0.5

# The byte-level alphabet takes ids 0..255; names as in the real tokenizer.
SPECIAL_TOKENS = {
    "<|im_start|>": 300,
    "<|im_end|>": 301,
    "system": 302,
    "user": 303,
    "assistant": 304,
    "<tts_pad>": 305,
    "<tts_text_bos>": 306,
    "<tts_text_eod>": 307,
    "<|audio_pad|>": 308,
    "<|image_pad|>": 309,
    "<|video_pad|>": 310,
    "<|vision_start|>": 311,
    "<|audio_start|>": 312,
    "<|audio_end|>": 313,
    "<|vision_end|>": 314,
}
CODEC_SPECIALS = {
    "nothink": 1,
    "think_bos": 2,
    "think_eos": 3,
    "pad": 4,
    "bos": 5,
    "ethan": 10,
    "chelsie": 11,
    "eos": 100,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('audio', 'input_audio', 'audio_url') %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _codec(name: str) -> int:
    return CODEBOOK + CODEC_SPECIALS[name]


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


def _attention(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": _rope(),
    }


def _thinker() -> dict[str, Any]:
    return {
        "text_config": {
            **_attention(layers=4),
            "vocab_size": TEXT_VOCABULARY,
            "intermediate_size": 96,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        "audio_config": {
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "max_source_positions": 1500,
            "n_window": 50,
            "output_dim": HIDDEN,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "downsample_hidden_size": 16,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "image_size": 32,
            "apply_vit_abs_pos_embed": True,
        },
        "audio_token_id": SPECIAL_TOKENS["<|audio_pad|>"],
        "image_token_id": SPECIAL_TOKENS["<|image_pad|>"],
        "video_token_id": SPECIAL_TOKENS["<|video_pad|>"],
        "audio_start_token_id": SPECIAL_TOKENS["<|audio_start|>"],
        "audio_end_token_id": SPECIAL_TOKENS["<|audio_end|>"],
        "user_token_id": SPECIAL_TOKENS["user"],
        "vision_start_token_id": SPECIAL_TOKENS["<|vision_start|>"],
        "position_id_per_seconds": 13,
    }


def _talker() -> dict[str, Any]:
    return {
        "text_config": {
            **_attention(layers=3),
            "vocab_size": TALKER_VOCABULARY,
            "intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_code_groups": QUANTIZERS,
            "max_position_embeddings": 4096,
        },
        "num_code_groups": QUANTIZERS,
        "thinker_hidden_size": HIDDEN,
        "accept_hidden_layer": 3,
        "codec_eos_token_id": _codec("eos"),
        "codec_nothink_id": _codec("nothink"),
        "codec_think_bos_id": _codec("think_bos"),
        "codec_think_eos_id": _codec("think_eos"),
        "codec_pad_id": _codec("pad"),
        "codec_bos_id": _codec("bos"),
        "audio_token_id": SPECIAL_TOKENS["<|audio_pad|>"],
        "image_token_id": SPECIAL_TOKENS["<|image_pad|>"],
        "video_token_id": SPECIAL_TOKENS["<|video_pad|>"],
        "vision_start_token_id": SPECIAL_TOKENS["<|vision_start|>"],
        "audio_start_token_id": SPECIAL_TOKENS["<|audio_start|>"],
        "speaker_id": {"ethan": _codec("ethan"), "chelsie": _codec("chelsie")},
        "spatial_merge_size": 2,
        "position_id_per_seconds": 13,
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": CODEBOOK,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_quantizers": QUANTIZERS,
        "upsample_rates": [4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 32,
        "max_position_embeddings": 8000,
    }


def build_config() -> Any:
    """The Qwen3OmniMoeConfig of the tiny model."""
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(
        thinker_config=_thinker(),
        talker_config=_talker(),
        code2wav_config=_code2wav(),
        enable_audio_output=True,
        im_start_token_id=SPECIAL_TOKENS["<|im_start|>"],
        im_end_token_id=SPECIAL_TOKENS["<|im_end|>"],
        tts_pad_token_id=SPECIAL_TOKENS["<tts_pad>"],
        tts_bos_token_id=SPECIAL_TOKENS["<tts_text_bos>"],
        tts_eos_token_id=SPECIAL_TOKENS["<tts_text_eod>"],
        system_token_id=SPECIAL_TOKENS["system"],
        user_token_id=SPECIAL_TOKENS["user"],
        assistant_token_id=SPECIAL_TOKENS["assistant"],
    )


def initialise(model: Any, seed: int = SEED) -> None:
    """Fill every parameter from its name and the seed, whatever the order of modules and the library's own defaults."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed((zlib.crc32(name.encode()) + seed) & 0x7FFFFFFF)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
        _scale_output(model.code2wav)


def _scaled(name: str, noise: Any) -> Any:
    if "layer_scale" in name or name.endswith(".gamma"):
        return 0.3 + 0.05 * noise
    if name.endswith((".alpha", ".beta")):
        return 0.2 * noise
    if noise.ndim == 1:
        return 1 + 0.1 * noise if name.endswith("weight") else 0.05 * noise
    if "embed" in name:
        return 0.7 * noise
    fan_in = noise.shape[-1] if noise.ndim == 3 and "experts" in name else noise.shape[1:].numel()
    return noise * (1.3 / math.sqrt(fan_in))


def _scale_output(code2wav: Any) -> None:
    import torch

    frames = torch.randint(0, CODEBOOK, (1, QUANTIZERS, 64), generator=torch.Generator().manual_seed(1))
    last = code2wav.decoder[-1].conv
    last.weight.mul_(1e-4)  # far from the clamp, so that the peak is a linear function of the weight
    last.bias.zero_()
    last.weight.mul_(PEAK / code2wav(frames).abs().max())


def build_processor() -> Any:
    """Byte-level tokenizer, mel features, image patches and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    named = set(SPECIAL_TOKENS.values())
    vocabulary |= {f"<unused{i}>": i for i in range(256, TEXT_VOCABULARY) if i not in named}
    vocabulary |= SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<unused256>",  # noqa: S106
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 32 * 32}
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        video_processor=Qwen2VLVideoProcessor(**patches),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=MEL_BINS,
            sampling_rate=16_000,
            hop_length=160,
            chunk_length=30,
            n_fft=400,
            return_attention_mask=True,
        ),
        tokenizer=fast,
        chat_template=CHAT_TEMPLATE,
    )


def build_qwen3_omni_tiny(folder: Path, report: Report) -> None:
    """Write the checkpoint, tokenizer and processor into `folder`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import GenerationConfig, Qwen3OmniMoeForConditionalGeneration

    report("qwen3-omni-tiny: building")
    model = Qwen3OmniMoeForConditionalGeneration(build_config()).to(torch.float32).eval()
    initialise(model)
    model.save_pretrained(folder)
    end = SPECIAL_TOKENS["<|im_end|>"]
    GenerationConfig(eos_token_id=end, pad_token_id=256).save_pretrained(folder)
    build_processor().save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    (folder / MARKER).write_text(
        json.dumps({"name": "qwen3-omni-tiny", "seed": SEED, "parameters": parameters}, indent=2)
    )
    report(f"qwen3-omni-tiny: {parameters} parameters")
