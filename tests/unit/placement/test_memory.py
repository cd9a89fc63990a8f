"""The memory model: published figures, parallelism, KV caches of all kinds, sources, and what engines reserve."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_operator.placement.config import UnknownModel, decoder_parameters, layer_groups, text_part
from omni_operator.placement.known import CONFIGS, QWEN3_OMNI, known_part
from omni_operator.placement.kvcache import bytes_per_request, bytes_per_token
from omni_operator.placement.memory import concurrent_requests, stage_memory
from omni_operator.placement.modelfacts import (
    AttentionKind,
    Diffusion,
    LayerGroup,
    ModelPart,
    Parallelism,
)
from omni_operator.placement.types import StageMemory
from omni_operator.placement.weights import (
    bytes_by_prefix,
    device_bytes,
    from_files,
    parse_safetensors_header,
)
from omni_operator.placement.workspace import diffusion_terms
from omni_runtime.deploy.plan import StagePlan
from omni_runtime.topology.types import EngineKind
from scripts.placement_docs import FIGURES, Figure
from tests.unit.placement.builders import GIB, a_plan, catalogue, custom, example, qwen

LLAMA = CONFIGS["meta-llama/llama-3.1-8b"]
GEMMA3 = CONFIGS["google/gemma-3-27b"]
DEEPSEEK = CONFIGS["deepseek-ai/deepseek-v3"]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.what)
def test_within_ten_percent_of_what_was_published(figure: Figure) -> None:
    assert abs(figure.deviation) <= 0.10, f"{figure.ours} against {figure.published} ({figure.source})"


def memory_of(plan_of: object, name: str) -> StageMemory:
    plan = a_plan(plan_of)  # type: ignore[arg-type]
    stage = plan.stage(name)
    device = catalogue().device(stage.profile, stage.device.device_class)
    assert device is not None
    return stage_memory(stage, known_part(plan.model, plan.topology, stage), device)


def term(memory: StageMemory, name: str) -> int:
    return next((t.bytes for t in memory.terms if t.name == name), 0)


# ------------------------------------------------------------------------------------------------ weights
def test_every_term_says_where_it_is_from() -> None:
    for name in ("thinker", "talker", "code2wav"):
        memory = memory_of(example("qwen3-omni"), name)
        assert memory.terms
        assert all(t.source and t.bytes > 0 for t in memory.terms), memory.terms
        assert memory.need == sum(t.bytes for t in memory.terms)


@given(tensor=st.sampled_from([1, 2, 4, 8]), pipeline=st.sampled_from([1, 2, 4]))
def test_ranks_together_hold_at_least_the_whole_model(tensor: int, pipeline: int) -> None:
    part = text_part(LLAMA)
    one = device_bytes(part, Parallelism(tensor=tensor, pipeline=pipeline))
    assert one * tensor * pipeline >= part.weight_bytes * 0.999
    assert one <= part.weight_bytes


def test_expert_parallel_splits_experts_and_nothing_else() -> None:
    part = text_part(CONFIGS["qwen/qwen3-30b-a3b"])
    spread = device_bytes(part, Parallelism(tensor=2, expert=8))
    tensor = device_bytes(part, Parallelism(tensor=2))
    assert tensor - spread == pytest.approx(part.expert_bytes * (1 / 2 - 1 / 8), rel=1e-6)


@pytest.mark.parametrize("name", ["ulysses", "ring", "cfg", "data"])
def test_sequence_cfg_and_data_ranks_hold_all_weights(name: str) -> None:
    part = text_part(LLAMA)
    assert device_bytes(part, Parallelism(**{name: 4})) == device_bytes(part, Parallelism())


def test_quantization_shrinks_linear_layers_only() -> None:
    plain = text_part(LLAMA)
    fp8 = text_part({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    awq = text_part({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    ends = 2 * 2 * 128_256 * 4096  # embedding and head stay as they are
    assert fp8.weight_bytes == pytest.approx((plain.weight_bytes - ends) / 2 + ends, rel=0.01)
    assert awq.weight_bytes == pytest.approx((plain.weight_bytes - ends) * 4.25 / 16 + ends, rel=0.01)
    groups = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
    assert text_part({**LLAMA, "quantization_config": groups}).weight_bytes == fp8.weight_bytes


def test_an_unknown_scheme_is_counted_in_full_and_says_so() -> None:
    part = text_part({**LLAMA, "quantization_config": {"quant_method": "magic"}})
    assert part.weight_bytes == text_part(LLAMA).weight_bytes
    assert "magic" in part.source


def test_safetensors_headers_are_read_exactly() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "thinker.a": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        "talker.b": {"dtype": "F8_E4M3", "shape": [10], "data_offsets": [64, 74]},
        "talker.scalar": {"dtype": "F32", "shape": [], "data_offsets": [74, 78]},
    }
    data = json.dumps(header).encode()
    tensors = parse_safetensors_header(len(data).to_bytes(8, "little") + data + b"weights follow")
    assert tensors == {"thinker.a": 64, "talker.b": 10, "talker.scalar": 4}
    assert bytes_by_prefix(tensors, ("talker.",)) == 14
    part = from_files(text_part(LLAMA), tensors, ())
    assert part.weight_bytes == pytest.approx(78, abs=1)
    assert part.source.startswith("safetensors headers")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (99).to_bytes(8, "little") + b"{}",
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_what_is_no_header_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="header|starts with"):
        parse_safetensors_header(data)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "4096", True])
def test_a_configuration_without_a_size_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnknownModel, match=field):
        decoder_parameters({**LLAMA, field: value})


# ------------------------------------------------------------------------------------------------ KV cache
def test_heads_that_are_fewer_than_the_ranks_are_copied() -> None:
    part = text_part(CONFIGS["qwen/qwen3-30b-a3b"])  # 4 key-value heads
    assert bytes_per_token(part, element=2, tensor=4) == bytes_per_token(part, element=2) // 4
    assert bytes_per_token(part, element=2, tensor=8) == bytes_per_token(part, element=2, tensor=4)


def test_latent_cache_is_the_same_on_every_rank() -> None:
    part = text_part(DEEPSEEK)
    assert bytes_per_token(part, element=2, tensor=8) == bytes_per_token(part, element=2) == 70_272


def test_fp8_halves_the_cache() -> None:
    part = text_part(LLAMA)
    assert bytes_per_request(part, 8192, element=1) * 2 == bytes_per_request(part, 8192, element=2)


def test_sliding_layers_keep_their_window() -> None:
    part = text_part(GEMMA3)
    kinds = {g.kind: g.count for g in part.layers}
    assert kinds == {AttentionKind.FULL: 10, AttentionKind.SLIDING: 52}
    row = 2 * 16 * 128 * 2  # keys and values of one position and layer
    assert bytes_per_request(part, 32_768, element=2) == row * (10 * 32_768 + 52 * 1024)
    assert bytes_per_request(part, 512, element=2) == row * 62 * 512, "a short request never fills the window"


def test_hybrid_layers_hold_a_state_that_does_not_grow() -> None:
    config = {
        **LLAMA, "num_hidden_layers": 8, "full_attention_interval": 4, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    groups = {g.kind: g for g in layer_groups(config)}
    assert groups[AttentionKind.RECURRENT].count == 6
    assert groups[AttentionKind.FULL].count == 2
    part = text_part(config)
    short, long = (bytes_per_request(part, n, element=2) for n in (16, 16 * 1024))
    state = 6 * groups[AttentionKind.RECURRENT].state_elements * 2
    assert long - short == 2 * (2 * 8 * 128 * 2) * (16 * 1024 - 16)
    assert short > state > 0


def test_layer_types_win_over_patterns() -> None:
    types = ["sliding_attention", "full_attention"] * 16
    groups = {g.kind: g.count for g in layer_groups({**LLAMA, "sliding_window": 4096, "layer_types": types})}
    assert groups == {AttentionKind.FULL: 16, AttentionKind.SLIDING: 16}


@given(st.integers(1, 40_000), st.sampled_from([1, 2, 4, 8]))
def test_a_longer_request_never_takes_less(tokens: int, tensor: int) -> None:
    part = text_part(GEMMA3)
    assert bytes_per_request(part, tokens, element=2, tensor=tensor) <= bytes_per_request(
        part, tokens + 1, element=2, tensor=tensor
    )


# ------------------------------------------------------------------------------------------------ engines
def test_vllm_needs_one_request_and_the_talker_all_of_its_slots() -> None:
    thinker, talker = (memory_of(qwen(), name) for name in ("thinker", "talker"))
    assert term(thinker, "KV cache") == 32_768 * 98_304
    assert thinker.kv_full == 64 * term(thinker, "KV cache")
    assert term(talker, "KV slots") == 64 * 8192 * 20_480
    assert concurrent_requests(talker) is None
    at_once = concurrent_requests(thinker)
    assert at_once is not None and 1 < at_once < 64


def test_fewer_slots_take_less_and_graphs_only_where_they_are_captured() -> None:
    few = memory_of(qwen("[{name: talker, maxConcurrency: 8}]"), "talker")
    assert term(few, "KV slots") * 8 == term(memory_of(qwen(), "talker"), "KV slots")
    eager = qwen("[{name: thinker, engineArgs: [{name: enforce_eager, value: 'true'}]}]")
    assert term(memory_of(eager, "thinker"), "captured graphs") == 0
    alone = custom("[{name: writer, engine: ar_vllm, accelerator: {class: nvidia-h100-80gb}}]")
    assert term(memory_of(alone, "writer"), "captured graphs") > 0


def test_text_alone_needs_no_encoder_cache() -> None:
    assert term(memory_of(qwen(), "thinker"), "encoder cache") == 62_720 * 2048 * 2
    text_only = qwen("[{name: thinker, engineArgs: [{name: language_model_only, value: 'true'}]}]")
    assert term(memory_of(text_only, "thinker"), "encoder cache") == 0


def test_tensor_parallel_adds_buffers_of_collectives() -> None:
    two = memory_of(qwen("[{name: thinker, parallelism: {tensor: 2}}]"), "thinker")
    assert term(two, "collectives") > 0
    assert term(memory_of(qwen(), "thinker"), "collectives") == 0


def test_float32_doubles_weights_and_cache() -> None:
    plain = memory_of(qwen(), "thinker")
    wide = memory_of(qwen("[{name: thinker, engineArgs: [{name: dtype, value: float32}]}]"), "thinker")
    for name in ("weights", "KV cache"):
        assert term(wide, name) == pytest.approx(2 * term(plain, name), rel=1e-6)


def test_offloaded_weights_leave_the_device() -> None:
    args = "[{name: thinker, engineArgs: [{name: cpu_offload_gb, value: '10'}]}]"
    assert term(memory_of(qwen(), "thinker"), "weights") - term(memory_of(qwen(args), "thinker"), "weights") == 10 * GIB


def test_a_cpu_stage_is_held_by_its_container() -> None:
    memory = memory_of(example("smol-omni"), "thinker")
    assert memory.capacity == (4 << 30) + (64 << 20)
    assert memory.missing == 0
    assert term(memory, "connector arena") == 64 << 20


def test_what_nobody_knows_is_not_checked() -> None:
    memory = memory_of(custom("[{name: writer, engine: ar_vllm}]", uri="hf://someone/secret"), "writer")
    assert not memory.known
    assert memory.missing == 0


def test_variants_of_a_known_model_are_found_by_name() -> None:
    stage = a_plan(custom("[{name: writer, engine: ar_vllm}]")).stages[0]
    for uri in ("hf://meta-llama/Llama-3.1-8B", "hf://meta-llama/Llama-3.1-8B-Instruct"):
        part = known_part(msgspec.structs.replace(a_plan(qwen()).model, uri=uri), "custom", stage)
        assert part is not None and part.weight_bytes == text_part(LLAMA).weight_bytes


# ------------------------------------------------------------------------------------------------ diffusion
DIT = ModelPart("dit", 24 << 30, "test", diffusion=Diffusion(hidden=3072, width=1024, height=1024))


def amounts(parallel: Parallelism, diffusion: Diffusion | None = None, requests: int = 1) -> dict[str, int]:
    chosen = diffusion or DIT.diffusion
    assert chosen is not None
    return {t.name: t.bytes for t in diffusion_terms(chosen, parallel, requests, 2)}


def test_sequence_ranks_share_tokens_cfg_ranks_share_passes_and_patches_share_the_decode() -> None:
    alone = amounts(Parallelism())
    assert amounts(Parallelism(ulysses=2, ring=2))["activations"] * 4 == alone["activations"]
    assert amounts(Parallelism(cfg=2))["activations"] * 2 == alone["activations"]
    assert amounts(Parallelism(vae_patch=4))["VAE decode"] * 4 == alone["VAE decode"]
    assert amounts(Parallelism(ulysses=4))["latents"] == alone["latents"]


def test_tiling_bounds_the_decode_of_video() -> None:
    video = Diffusion(hidden=3072, width=1280, height=720, frames=81)
    tiled = replace(video, vae_tile=256)
    assert amounts(Parallelism(), tiled)["VAE decode"] < amounts(Parallelism(), video)["VAE decode"] / 10


def test_a_diffusion_stage_has_latents_instead_of_a_cache() -> None:
    stage: StagePlan = a_plan(custom("[{name: writer, engine: ar_vllm}]")).stages[0]
    device = catalogue().device("cuda", "nvidia-h100-80gb")
    assert device is not None
    names = {t.name for t in stage_memory(stage, DIT, device).terms}
    assert {"latents", "VAE decode", "weights"} <= names
    assert "KV cache" not in names


def test_recurrent_and_latent_groups_hold_what_they_say() -> None:
    part = ModelPart("x", 1, "test", layers=(LayerGroup(3, AttentionKind.LATENT, latent_dim=576),))
    assert bytes_per_token(part, element=2) == 3 * 576 * 2
    assert QWEN3_OMNI[EngineKind.QWEN3_OMNI_TALKER].layers[0].kv_heads == 2
