"""Whatever the API server lets in, resolve() answers with a plan or with InvalidPipeline, and always with the same."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_runtime.deploy.model import Target
from omni_runtime.deploy.plan import ResolvedPlan, canonical_json, load_plan, revision_of
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import FieldError, InvalidPipeline
from omni_runtime.topology import graph
from tests.unit.deploy.builders import PROFILES, a_pipeline

# Few names, so that they meet: a random graph of random names would only ever be "unknown stage".
STAGE_NAMES = st.sampled_from(["thinker", "talker", "code2wav", "a", "b"])
ENGINES = st.sampled_from(
    ["ar_vllm", "hibari_acoustic", "hibari_vocoder", "qwen3_omni_talker", "qwen3_omni_code2wav", "none"]
)
QUANTITIES = st.sampled_from(["0", "100m", "1", "64Mi", "1.5Gi", "4Gi", "9999P"])
ARGS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["max_model_len", "seed", "dtype", "hf_overrides", "enforce_eager", "model", "zzz"]),
        "value": st.one_of(
            st.sampled_from(["1", "true", "false", "float32", "{}", "64"]),
            st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=12),
        ),
    }
)


def _maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


SCALING = st.fixed_dictionaries({"minReplicas": st.integers(0, 5), "maxReplicas": st.integers(1, 5)})
STAGE_FIELDS = {
    "runtimeProfile": st.sampled_from(["cpu", "cuda", "tcp-only", "near", "upstream", "gone"]),
    "podGroup": st.sampled_from(["g", "h"]),
    "replicas": st.integers(0, 1000),
    "scaling": SCALING,
    "accelerator": st.fixed_dictionaries(
        {"class": st.sampled_from(["cpu", "nvidia-l4", "nvidia-h100-80gb", "gone"])},
        optional={"count": st.integers(1, 8), "memoryFraction": st.sampled_from(["0.001", "0.5", "1", "1.0"])},
    ),
    "parallelism": _maybe(tensor=st.integers(1, 8), pipeline=st.integers(1, 8)),
    "resources": _maybe(cpu=QUANTITIES, memory=QUANTITIES, sharedMemory=QUANTITIES),
    "scheduling": _maybe(
        nodeSelector=st.dictionaries(st.sampled_from(["gpu", "pool", "z"]), st.sampled_from(["l4", "h100", ""])),
        tolerations=st.lists(
            _maybe(effect=st.sampled_from(["NoSchedule", "NoExecute"])).map(lambda t: {"operator": "Exists", **t}),
            max_size=3,
        ),
    ),
    "engineArgs": st.lists(ARGS, max_size=3),
    "maxConcurrency": st.integers(1, 4096),
}
EDGES = st.fixed_dictionaries(
    {"from": STAGE_NAMES, "to": STAGE_NAMES},
    optional={
        "payload": st.sampled_from(["text_segments", "codec_frames"]),
        "mode": st.sampled_from(["asyncChunk", "fullPayload"]),
        "chunk": _maybe(
            initialFrames=st.integers(1, 4096), frames=st.integers(1, 4096), leftContextFrames=st.integers(0, 4096)
        ),
        "connector": st.fixed_dictionaries({"type": st.sampled_from(["Auto", "SharedMemory", "TCP", "Mooncake"])}),
    },
)
URIS = st.sampled_from(["hf://a/b", "packaged://smol-omni", "pvc://c/p", "file:///m", "file:///../m"])


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    topology = draw(st.sampled_from(["qwen3_omni_moe", "smol_omni", "custom", "custom", "other"]))
    stage = st.fixed_dictionaries({"name": STAGE_NAMES}, optional={**STAGE_FIELDS, "engine": ENGINES})
    spec: dict[str, Any] = {
        "model": {"uri": draw(URIS)},
        "topology": topology,
        "stages": draw(st.lists(stage, max_size=4)),
        "edges": draw(st.lists(EDGES, max_size=4)),
        **draw(
            _maybe(
                runtimeProfile=st.sampled_from(["cpu", "cuda", "gone"]),
                budget=st.fixed_dictionaries({"accelerators": st.integers(0, 9)}),
            )
        ),
    }
    return spec


@st.composite
def mostly_valid_specs(draw: st.DrawFn) -> dict[str, Any]:
    """Specs that usually resolve, so that properties of plans are tested on plans."""
    speech = draw(st.booleans())
    stages = []
    for name in ("thinker", "talker", "code2wav"):
        fields = _maybe(replicas=st.integers(0, 9)) if draw(st.booleans()) and name == "thinker" else _maybe()
        other = _maybe(
            maxConcurrency=st.integers(1, 64),
            engineArgs=st.just([{"name": "seed", "value": "1"}, {"name": "threads", "value": "2"}]),
        )
        group = {"podGroup": "g"} if speech and name != "thinker" else {}
        stages.append({"name": name, **draw(fields), **draw(other), **group})
    if draw(st.booleans()):
        engines = {"thinker": "ar_vllm", "talker": "qwen3_omni_talker", "code2wav": "qwen3_omni_code2wav"}
        half = {"accelerator": {"class": "nvidia-l4", "memoryFraction": "0.5"}, "resources": {"sharedMemory": "1Gi"}}
        stages = [{**s, **half, "engine": engines[s["name"]]} for s in stages]
        edges: list[dict[str, Any]] = [{"from": "thinker", "to": "talker"}, {"from": "talker", "to": "code2wav"}]
        return {
            "model": {"uri": "hf://a/b"},
            "topology": "custom",
            "runtimeProfile": "cuda",
            "stages": stages,
            "edges": edges,
        }
    return {"model": {"uri": "hf://a/b"}, "topology": "qwen3_omni_moe", "runtimeProfile": "cuda", "stages": stages}


def outcome(spec: dict[str, Any], target: Target = "kubernetes") -> ResolvedPlan | tuple[FieldError, ...]:
    """The plan, or the reasons against it. Any other exception fails the test."""
    try:
        return resolve(a_pipeline(spec), PROFILES, target=target)
    except InvalidPipeline as invalid:
        return invalid.errors


@settings(max_examples=200, deadline=None)
@given(specs())
def test_a_plan_or_reasons_and_nothing_else(spec: dict[str, Any]) -> None:
    assert outcome(spec) == outcome(spec)


@settings(max_examples=200, deadline=None)
@given(specs())
def test_every_reason_has_a_place_and_a_fix(spec: dict[str, Any]) -> None:
    found = outcome(spec, "local")
    if isinstance(found, ResolvedPlan):
        return
    assert found, "an invalid pipeline without a reason"
    assert len(set(found)) == len(found)
    for error in found:
        assert error.path.startswith("spec.")
        assert error.problem
        assert error.fix


@settings(max_examples=60, deadline=None)
@given(mostly_valid_specs(), st.randoms(use_true_random=False))
def test_the_order_of_keys_and_list_maps_does_not_change_the_plan(spec: dict[str, Any], chance: random.Random) -> None:
    plan = outcome(spec)
    assert isinstance(plan, ResolvedPlan), plan
    shuffled = outcome(_shuffled(spec, chance))
    assert isinstance(shuffled, ResolvedPlan)
    assert shuffled == plan


@settings(max_examples=100, deadline=None)
@given(mostly_valid_specs(), st.integers(0, 1000))
def test_replicas_never_change_the_revision(spec: dict[str, Any], count: int) -> None:
    plan = outcome(spec)
    scaled = outcome({**spec, "stages": [{**s, "replicas": count} for s in spec["stages"]]})
    assert isinstance(plan, ResolvedPlan)
    assert isinstance(scaled, ResolvedPlan)
    assert scaled.revision == plan.revision
    assert {b.initial for b in scaled.replicas.values()} == {count}


@settings(max_examples=100, deadline=None)
@given(mostly_valid_specs())
def test_a_plan_keeps_its_promises(spec: dict[str, Any]) -> None:
    plan = outcome(spec)
    assert isinstance(plan, ResolvedPlan)
    assert load_plan(canonical_json(plan)) == plan
    assert plan.revision == revision_of(plan)
    place = {stage.name: i for i, stage in enumerate(plan.stages)}
    assert all(place[e.source] < place[e.to] for e in plan.edges), "topological order"
    assert {e.connector for e in plan.edges} <= {"SharedMemory", "TCP", "Mooncake"}, "Auto is a wish, not a plan"
    for leader, members in plan.pod_groups().items():
        assert members[0].name == leader


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda e: e[0] != e[1]), max_size=24))
def test_a_graph_has_an_order_or_a_cycle(pairs: list[tuple[int, int]]) -> None:
    nodes = [str(i) for i in range(8)]
    edges = [(str(a), str(b)) for a, b in pairs]
    order, cycle = graph.topological_order(nodes, edges), graph.find_cycle(nodes, edges)
    assert (order is None) == (cycle is not None)
    if order is not None:
        assert sorted(order) == nodes
        assert all(order.index(a) < order.index(b) for a, b in edges)
    if cycle is not None:
        assert cycle[0] == cycle[-1]
        assert set(itertools.pairwise(cycle)) <= set(edges)


def _shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        chance.shuffle(keys)
        return {key: _shuffled(value[key], chance) for key in keys}
    if isinstance(value, list):
        items = [_shuffled(item, chance) for item in value]
        chance.shuffle(items)
        return items
    return value
