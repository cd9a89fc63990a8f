"""A plan as the resolver gives it, with the fields that the entry reads."""

from __future__ import annotations

import msgspec

from omni_runtime.deploy.plan import (
    CONTRACT_VERSION,
    DevicePlan,
    EdgePlan,
    EntryPlan,
    ModelRef,
    ReplicaBounds,
    ResolvedPlan,
    StagePlan,
    revision_of,
)
from omni_runtime.topology.types import EngineKind, Modality, PayloadContract

TEXT, AUDIO = Modality.TEXT, Modality.AUDIO


def a_stage(name: str, engine: EngineKind, emits: tuple[Modality, ...], needed: tuple[Modality, ...]) -> StagePlan:
    return StagePlan(
        name=name,
        engine=engine,
        emits=emits,
        required_for=needed,
        pod_group=name,
        profile="cpu",
        image="omni-cpu:test",
        connector_image="omni-cpu:test",
        image_pull_policy="IfNotPresent",
        image_pull_secrets=(),
        device=DevicePlan("cpu", 0, None, 1.0),
        tensor_parallel=1,
        pipeline_parallel=1,
        max_concurrency=4,
        cpu="1",
        memory="1Gi",
        shared_memory="64Mi",
        engine_args=(),
        env=(),
        node_selector=(),
        tolerations=(),
        priority_class_name=None,
        model_cache_claim=None,
        model_cache_host_path=None,
        startup_timeout_seconds=60,
        probe_period_seconds=5,
    )


def a_plan(max_queue: int = 8, first_edge: PayloadContract = PayloadContract.THINKER_HIDDEN) -> ResolvedPlan:
    """thinker -> talker -> code2wav, as in qwen3_omni_moe; with text_segments first, as in smol_omni."""
    plan = ResolvedPlan(
        pipeline="test-omni",
        topology="qwen3_omni_moe",
        revision="",
        contract_version=CONTRACT_VERSION,
        model=ModelRef("packaged://test", None, "test-omni"),
        stages=(
            a_stage("thinker", EngineKind.AR_VLLM, (TEXT,), (TEXT, AUDIO)),
            a_stage("talker", EngineKind.QWEN3_OMNI_TALKER, (), (AUDIO,)),
            a_stage("code2wav", EngineKind.QWEN3_OMNI_CODE2WAV, (AUDIO,), (AUDIO,)),
        ),
        edges=(
            EdgePlan("thinker", "talker", first_edge, "asyncChunk", "TCP", 1, 1, 0),
            EdgePlan("talker", "code2wav", PayloadContract.CODEC_FRAMES, "asyncChunk", "TCP", 4, 25, 28),
        ),
        entry=EntryPlan("omni-cpu:test", "IfNotPresent", (), "1", "1Gi", 80, max_queue, (), ()),
        drain_timeout_seconds=30,
        replicas={n: ReplicaBounds(1, 1, 1) for n in ("thinker", "talker", "code2wav")},
        origins={},
    )
    return msgspec.structs.replace(plan, revision=revision_of(plan))
