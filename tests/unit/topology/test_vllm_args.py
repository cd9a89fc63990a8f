"""The engine args that we hand to vLLM are vLLM's own, with the types that we say; loads vLLM, no model."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from omni_runtime.topology.engines import ENGINES, ArgType
from omni_runtime.topology.types import EngineKind

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]  # importing vLLM takes a while on a busy machine

OURS = {"threads", "chunk_deadline_s", "tap"}  # read by the stage worker or our engine, never handed on


@pytest.fixture(scope="module")
def vllm_args() -> dict[str, Any]:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    return {f.name: f.type for f in dataclasses.fields(arg_utils.AsyncEngineArgs)}


def test_every_known_arg_exists(vllm_args: dict[str, Any]) -> None:
    ours = {a.name for a in ENGINES[EngineKind.AR_VLLM].args} - OURS
    assert ours <= set(vllm_args), sorted(ours - set(vllm_args))


def test_types_agree(vllm_args: dict[str, Any]) -> None:
    for arg in ENGINES[EngineKind.AR_VLLM].args:
        if arg.name in OURS or arg.type in (ArgType.STR, ArgType.JSON):
            continue
        spelled = str(vllm_args[arg.name])
        assert arg.type.value in spelled, f"{arg.name}: vLLM says {spelled}"


def test_flags_that_have_another_place_exist_too(vllm_args: dict[str, Any]) -> None:
    """A refused name that vLLM does not know would only be a typo of ours."""
    ours = {"download_dir", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_num_seqs"}
    refused = {name for name, _ in ENGINES[EngineKind.AR_VLLM].refused}
    assert ours <= refused & set(vllm_args)
    for name in (
        "data_parallel_size",
        "enable_expert_parallel",
        "worker_extension_cls",
        "trust_remote_code",
        "kv_transfer_config",
    ):
        assert name in refused & set(vllm_args)


def test_closed_lists_are_of_the_words_that_vllm_knows() -> None:
    cache, quantization = (
        pytest.importorskip(name) for name in ("vllm.config.cache", "vllm.model_executor.layers.quantization")
    )
    ours = {a.name: set(a.choices) for a in ENGINES[EngineKind.AR_VLLM].args}
    assert ours["kv_cache_dtype"] <= set(get_args(cache.CacheDType))
    assert ours["quantization"] == set(quantization.QUANTIZATION_METHODS)
