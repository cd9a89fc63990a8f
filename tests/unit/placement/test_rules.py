"""Each rule by a plan that it alone refuses; without the rule the same plan passes all others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from omni_operator.placement import Catalogue, ClusterView, rules
from omni_operator.placement.question import Question, ask
from omni_operator.placement.types import PlacementWarning
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import FieldError
from tests.unit.placement.builders import a_cluster, a_node, a_plan, catalogue, custom, qwen
from tests.unit.placement.corpus import A100, ASCEND, H100, args, on, writer

NPU = f"[{{name: writer, engine: ar_vllm, runtimeProfile: npu, {on(ASCEND)}%s}}]"


def a_question(plan: ResolvedPlan, cluster: ClusterView | None = None, known: Catalogue | None = None) -> Question:
    return ask(plan, cluster or ClusterView(), known or catalogue(), {}, {})


def with_device(plan: ResolvedPlan, name: str) -> ResolvedPlan:
    stages = tuple(
        msgspec.structs.replace(s, device=msgspec.structs.replace(s.device, device_class=name)) for s in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


def with_connector(plan: ResolvedPlan, name: str) -> ResolvedPlan:
    return msgspec.structs.replace(plan, edges=tuple(msgspec.structs.replace(e, connector=name) for e in plan.edges))


def only_bfloat16() -> Catalogue:
    device = catalogue().device("cuda", H100)
    assert device is not None
    return Catalogue({("cuda", H100): replace(device, dtypes=frozenset({"bfloat16"}))})


CASES: dict[str, tuple[Question, type, str]] = {
    "device_class_exists": (
        a_question(with_device(a_plan(writer()), "abacus")), FieldError, "stages[name=writer].accelerator.class"),
    "dtype_is_supported": (
        a_question(a_plan(writer(args(dtype="float32"))), known=only_bfloat16()), FieldError, "engineArgs[name=dtype]"),
    "kv_cache_dtype_is_supported": (
        a_question(a_plan(writer(args(kv_cache_dtype="fp8"), device=A100))), FieldError, "kv_cache_dtype"),
    "quantization_is_supported": (a_question(a_plan(custom(NPU % args(quantization="fp8")))), FieldError, "quantization"),
    "tensor_divides_heads": (a_question(a_plan(writer(", parallelism: {tensor: 3}"))), FieldError, "parallelism.tensor"),
    "pipeline_has_layers": (a_question(a_plan(writer(", parallelism: {pipeline: 40}"))), FieldError, "parallelism.pipeline"),
    "length_is_known_to_the_model": (
        a_question(a_plan(writer(args(max_model_len=500_000)))), FieldError, "max_model_len"),
    "step_holds_every_request": (
        a_question(a_plan(writer(args(max_num_batched_tokens=16) + ", maxConcurrency: 17"))), FieldError, "max_num_batched_tokens"),
    "cache_holds_a_request": (
        a_question(a_plan(writer(args(kv_cache_memory_bytes=1 << 20)))), FieldError, "kv_cache_memory_bytes"),
    "offloaded_weights_have_room": (
        a_question(a_plan(writer(args(cpu_offload_gb=1000)))), FieldError, "cpu_offload_gb"),
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {rule.__name__ for rule in rules.STAGE_RULES}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_its_case_and_no_other_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    question, kind, path = CASES[name]
    errors, _ = rules.check_rules(question)
    assert len(errors) == 1, errors
    assert isinstance(errors[0], kind)
    assert path in errors[0].path
    assert errors[0].fix
    monkeypatch.setattr(rules, "STAGE_RULES", tuple(r for r in rules.STAGE_RULES if r.__name__ != name))
    assert rules.check_rules(question)[0] == (), "the case is of this rule alone"


def test_the_entry_does_not_listen_where_its_control_channel_does() -> None:
    plan = a_plan(qwen())
    entry = msgspec.structs.replace(plan.entry, port=5500)
    (error,) = rules.check_rules(a_question(msgspec.structs.replace(plan, entry=entry)))[0]
    assert (error.path, error.value) == ("spec.entry.port", "5500")


def test_rdma_without_a_device_is_said() -> None:
    plan = with_connector(a_plan(qwen()), "Mooncake")
    without = rules.check_rules(a_question(plan, a_cluster(a_node("n", H100, 8))))[1]
    assert {w.code for w in without} == {"NoRdmaDevice"}
    assert all(isinstance(w, PlacementWarning) for w in without)
    offered = a_cluster(a_node("n", H100, 8, resources={"rdma/hca": 1}))
    assert rules.check_rules(a_question(plan, offered))[1] == ()
    assert rules.check_rules(a_question(plan))[1] == (), "nothing is known of the nodes"
    assert rules.check_rules(a_question(a_plan(qwen()), a_cluster(a_node("n", H100, 8))))[1] == (), "TCP needs none"
