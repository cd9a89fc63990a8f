"""Each rule by a plan that it alone refuses; without the rule the same plan passes all others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from omni_operator.placement import Catalogue, ClusterView, rules
from omni_operator.placement.question import Question, ask
from omni_operator.placement.types import NodeView, PlacementWarning
from omni_runtime.deploy.plan import RdmaPlan, ResolvedPlan
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


def with_rdma(plan: ResolvedPlan, rdma: RdmaPlan | None) -> ResolvedPlan:
    return msgspec.structs.replace(plan, stages=tuple(msgspec.structs.replace(s, rdma=rdma) for s in plan.stages))


def warned(plan: ResolvedPlan, *nodes: NodeView) -> set[str]:
    errors, warnings = rules.check_rules(a_question(plan, a_cluster(*nodes) if nodes else None))
    assert errors == ()
    assert all(isinstance(w, PlacementWarning) and w.path.startswith("spec.edges[") for w in warnings)
    return {w.code for w in warnings}


class TestMooncake:
    BARE = RdmaPlan((), None, 0)
    PLAN = with_connector(a_plan(qwen()), "Mooncake")

    def test_over_tcp_is_unwise(self) -> None:
        assert warned(self.PLAN) == {"MooncakeOverTcp"}
        assert warned(self.PLAN, a_node("n", H100, 8, resources={"rdma/hca": 1})) == {"MooncakeOverTcp"}
        assert warned(a_plan(qwen()), a_node("n", H100, 8)) == set(), "TCP needs no RDMA"

    def test_rdma_for_which_nothing_asks_needs_nodes_that_offer_it(self) -> None:
        plan = with_rdma(self.PLAN, self.BARE)
        assert warned(plan, a_node("n", H100, 8)) == {"NoRdmaDevice"}
        assert warned(plan) == set(), "nothing is known of the nodes"
        for name in ("rdma/hca", "nvidia.com/mlnxnics", "vpc.amazonaws.com/efa"):
            assert warned(plan, a_node("n", H100, 8, resources={name: 1})) == set()
        assert warned(plan, a_node("n", H100, 8, resources={"rdma/hca": 0})) == {"NoRdmaDevice"}

    def test_rdma_that_is_asked_for_is_the_nodes_own_check(self) -> None:
        assert warned(with_rdma(self.PLAN, RdmaPlan((), "rdma/hca", 1)), a_node("n", H100, 8)) == set()
