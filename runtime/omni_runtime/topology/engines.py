"""What each engine takes, gives and may be told. The resolver checks graphs and engine args against it. Torch-free.

Parallelism, memory, concurrency and names have one place each in the spec; the engine flag of the same meaning is
refused with a pointer to that place, because a second writer of one value is how two pods disagree.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from types import MappingProxyType

import msgspec

from omni_runtime.topology.types import EngineKind, Modality, PayloadContract


class ArgType(StrEnum):
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    STR = "str"
    JSON = "json"


class ArgSpec(msgspec.Struct, frozen=True):
    """One engine arg. Bounds are inclusive; choices apply to strings."""

    name: str
    type: ArgType
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


class EngineSpec(msgspec.Struct, frozen=True):
    kind: EngineKind
    consumes: tuple[PayloadContract, ...]  # empty: takes the client's request
    produces: tuple[PayloadContract, ...]
    emits: tuple[Modality, ...]  # what it sends to the client in a custom topology
    parallel: bool  # may spread one replica over several devices
    args: tuple[ArgSpec, ...]
    refused: tuple[tuple[str, str], ...] = ()  # arg -> why, and what to use instead
    speed: bool = False  # speaks faster or slower when a request asks for it

    def arg(self, name: str) -> ArgSpec | None:
        return next((a for a in self.args if a.name == name), None)


class BadArg(ValueError):
    """The value of an engine arg does not read as its type; the message says what would."""


_INT = re.compile(r"-?[0-9]{1,18}")
_FLOAT = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE]-?[0-9]{1,2})?")


def canonical_arg(spec: ArgSpec, value: str) -> str:
    """The value in its one spelling, so that "0512" and "512" are one revision. Raises BadArg."""
    if spec.type is ArgType.BOOL:
        if value not in ("true", "false"):
            raise BadArg("write true or false")
        return value
    if spec.type is ArgType.INT:
        if not _INT.fullmatch(value):
            raise BadArg("write a whole number")
        _check_bounds(spec, int(value))
        return str(int(value))
    if spec.type is ArgType.FLOAT:
        if not _FLOAT.fullmatch(value):
            raise BadArg("write a decimal number")
        number = float(value)  # finite: the form allows no exponent above 99
        _check_bounds(spec, number)
        return repr(number)
    if spec.type is ArgType.JSON:
        try:
            return json.dumps(json.loads(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise BadArg("write valid JSON") from error
    if spec.choices and value not in spec.choices:
        raise BadArg(f"use one of {', '.join(spec.choices)}")
    if not value or not value.isprintable():
        raise BadArg("write at least one character, and only printable ones")
    return value


def _check_bounds(spec: ArgSpec, number: float) -> None:
    if spec.minimum is not None and number < spec.minimum:
        raise BadArg(f"use at least {spec.minimum:g}")
    if spec.maximum is not None and number > spec.maximum:
        raise BadArg(f"use at most {spec.maximum:g}")


def _int(name: str, minimum: float = 1, maximum: float | None = None) -> ArgSpec:
    return ArgSpec(name, ArgType.INT, minimum, maximum)


_DTYPE = ArgSpec("dtype", ArgType.STR, choices=("auto", "float32", "bfloat16", "float16"))
# Of vLLM's own words those whose size the memory model knows; with any other the engine ends when it starts.
_KV_CACHE_TYPES = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc",
    "fp8_per_token_head", "int8_per_token_head", "nvfp4",
)  # fmt: skip
_QUANTIZATIONS = (
    "awq", "auto_awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "experts_int8", "fbgemm_fp8", "fp8",
    "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "fp_quant", "gpt_oss_mxfp4", "gptq", "auto_gptq", "gptq_marlin",
    "humming", "inc", "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8",
    "moe_wna16", "mxfp4", "mxfp8", "nvfp4_per_token", "online", "quark", "torchao",
)  # fmt: skip
# Every stage worker reads these, whatever its engine.
_WORKER = (_int("seed", 0), _int("threads", 1, 1024), ArgSpec("chunk_deadline_s", ArgType.FLOAT, 0, 86_400))

_NOT_HERE = (
    ("tensor_parallel_size", "set stages[].parallelism.tensor"),
    ("pipeline_parallel_size", "set stages[].parallelism.pipeline"),
    ("gpu_memory_utilization", "set stages[].accelerator.memoryFraction"),
    ("max_num_seqs", "set stages[].maxConcurrency"),
    ("model", "set spec.model.uri"),
    ("revision", "set spec.model.revision"),
    ("served_model_name", "set spec.model.servedName"),
    ("host", "the operator owns addresses; remove it"),
    ("port", "the operator owns ports; remove it"),
    ("download_dir", "set modelCache in the runtime profile"),
)

_VLLM_REFUSED = (
    *_NOT_HERE,
    ("data_parallel_size", "one replica is one engine; raise stages[].replicas"),
    ("data_parallel_size_local", "one replica is one engine; raise stages[].replicas"),
    ("data_parallel_address", "one replica is one engine; raise stages[].replicas"),
    ("data_parallel_rpc_port", "one replica is one engine; raise stages[].replicas"),
    ("data_parallel_backend", "one replica is one engine; raise stages[].replicas"),
    ("enable_expert_parallel", "expert parallelism needs data parallelism, which a stage does not use; remove it"),
    ("api_server_count", "the entry is the API server; remove it"),
    ("api_key", "the entry is the API server; remove it"),
    ("distributed_executor_backend", "the stage worker chooses it; remove it"),
    ("worker_cls", "the stage worker chooses it; remove it"),
    ("worker_extension_cls", "the hidden-state tap uses it; remove it"),
    ("kv_transfer_config", "edges carry the tensors; remove it"),
    ("speculative_config", "the hidden-state tap cannot follow speculative tokens; remove it"),
    ("trust_remote_code", "it runs code from the model's repository inside the pod; remove it"),
    ("headless", "the operator starts the stages; remove it"),
    ("stage_id", "the operator starts the stages; remove it"),
    ("replica_id", "the operator names the replicas; remove it"),
    ("omni", "the operator starts the stages; remove it"),
    ("worker_backend", "the operator starts the stages; remove it"),
)

_VLLM_ARGS = (
    *_WORKER,
    _DTYPE,
    _int("max_model_len", 16),
    _int("max_num_batched_tokens", 16),
    _int("kv_cache_memory_bytes", 1 << 20),
    _int("max_logprobs", 0, 1000),
    ArgSpec("block_size", ArgType.INT, 1, 256),
    ArgSpec("kv_cache_dtype", ArgType.STR, choices=_KV_CACHE_TYPES),
    ArgSpec("quantization", ArgType.STR, choices=_QUANTIZATIONS),
    ArgSpec("load_format", ArgType.STR),
    ArgSpec("tokenizer", ArgType.STR),
    ArgSpec("attention_backend", ArgType.STR),
    ArgSpec("cpu_offload_gb", ArgType.FLOAT, 0),
    ArgSpec("mm_processor_cache_gb", ArgType.FLOAT, 0),
    ArgSpec("limit_mm_per_prompt", ArgType.JSON),
    ArgSpec("mm_processor_kwargs", ArgType.JSON),
    ArgSpec("hf_overrides", ArgType.JSON),
    ArgSpec("compilation_config", ArgType.JSON),
    ArgSpec("enforce_eager", ArgType.BOOL),
    ArgSpec("tap", ArgType.STR, choices=("auto", "hooks", "aux")),
    ArgSpec("enable_sleep_mode", ArgType.BOOL),
    ArgSpec("enable_prefix_caching", ArgType.BOOL),
    ArgSpec("enable_chunked_prefill", ArgType.BOOL),
    ArgSpec("async_scheduling", ArgType.BOOL),
    ArgSpec("disable_sliding_window", ArgType.BOOL),
    ArgSpec("language_model_only", ArgType.BOOL),
    ArgSpec("skip_tokenizer_init", ArgType.BOOL),
)

ENGINES = MappingProxyType(
    {
        spec.kind: spec
        for spec in (
            EngineSpec(
                kind=EngineKind.AR_VLLM,
                consumes=(),
                produces=(PayloadContract.THINKER_HIDDEN, PayloadContract.TEXT_SEGMENTS),
                emits=(Modality.TEXT,),
                parallel=True,
                args=_VLLM_ARGS,
                refused=_VLLM_REFUSED,
            ),
            EngineSpec(
                kind=EngineKind.QWEN3_OMNI_TALKER,
                consumes=(PayloadContract.THINKER_HIDDEN,),
                produces=(PayloadContract.CODEC_FRAMES,),
                emits=(),
                parallel=False,
                args=(
                    *_WORKER,
                    _DTYPE,
                    _int("max_frames", 1, 65_536),
                    _int("max_prefill_rows", 16, 1 << 20),
                    ArgSpec("experts_implementation", ArgType.STR, choices=("eager", "grouped_mm", "batched_mm")),
                    ArgSpec("cuda_graphs", ArgType.BOOL),
                    ArgSpec("batch_invariant", ArgType.BOOL),
                ),
                refused=_NOT_HERE,
            ),
            EngineSpec(
                kind=EngineKind.QWEN3_OMNI_CODE2WAV,
                consumes=(PayloadContract.CODEC_FRAMES,),
                produces=(),
                emits=(Modality.AUDIO,),
                parallel=False,
                args=(*_WORKER, _DTYPE),
                refused=_NOT_HERE,
            ),
            EngineSpec(
                kind=EngineKind.HIBARI_ACOUSTIC,
                consumes=(PayloadContract.TEXT_SEGMENTS,),
                produces=(PayloadContract.ACOUSTIC_FRAMES,),
                emits=(),
                parallel=False,
                args=(
                    *_WORKER,
                    ArgSpec("voice", ArgType.STR),
                    ArgSpec("speed", ArgType.FLOAT, 0.25, 4.0),
                ),
                refused=_NOT_HERE,
                speed=True,
            ),
            EngineSpec(
                kind=EngineKind.HIBARI_VOCODER,
                consumes=(PayloadContract.ACOUSTIC_FRAMES,),
                produces=(),
                emits=(Modality.AUDIO,),
                parallel=False,
                args=_WORKER,
                refused=_NOT_HERE,
            ),
        )
    }
)


def payloads_between(source: EngineKind, to: EngineKind) -> tuple[PayloadContract, ...]:
    """What an edge between these engines can carry."""
    return tuple(p for p in ENGINES[source].produces if p in ENGINES[to].consumes)
