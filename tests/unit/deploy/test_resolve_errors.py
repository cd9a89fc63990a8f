"""Every way in which a pipeline can be wrong: the error names the field, shows the value and says what to do."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from omni_crds.v1alpha1.base import ObjectMeta
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import FieldError
from omni_runtime.topology import registry
from tests.unit.deploy.builders import PROFILES, QWEN, SMOL, a_pipeline, errors_of
from tests.unit.deploy.mistakes import CASES


@pytest.mark.parametrize(("spec", "path", "value", "problem", "fix"), CASES)
def test_each_mistake_is_named_with_its_fix(spec: str, path: str, value: str, problem: str, fix: str) -> None:
    found = errors_of(spec)
    at = [error for error in found if error.path == path and problem in error.problem]
    assert at, f"no error at {path} about {problem!r}; found:\n" + "\n".join(map(str, found))
    assert at[0].value == value
    assert fix in at[0].fix


@pytest.mark.parametrize("case", [pytest.param(c.values, id=c.id) for c in CASES])
def test_one_mistake_gives_one_line_at_most_two(case: tuple[str, ...]) -> None:
    """A list of errors that repeats itself is not read. Two: a cycle is an edge that the topology does not have, too."""
    found = errors_of(case[0])
    assert 1 <= len(found) <= 2, "\n".join(map(str, found))
    assert len(set(found)) == len(found)


def test_all_violations_come_at_once() -> None:
    found = errors_of(
        QWEN
        + """
stages:
- {name: thinker, accelerator: {class: nvidia-h200}, engineArgs: [{name: port, value: "1"}]}
- {name: talker, replicas: 1, scaling: {minReplicas: 9, maxReplicas: 2}}
"""
    )
    assert {e.path for e in found} == {
        "spec.stages[0].accelerator.class",
        "spec.stages[0].engineArgs[0].name",
        "spec.stages[1].replicas",
        "spec.stages[1].scaling.minReplicas",
    }


def test_default_profile_is_used_only_where_none_is_named() -> None:
    spec = 'model: {uri: "packaged://smol-omni"}\ntopology: smol_omni\n'
    assert errors_of(spec, default="cpu") == ()
    assert [e.path for e in errors_of(spec, default="gone")] == ["spec.runtimeProfile"]
    named = "stages: [{name: thinker, runtimeProfile: cpu}, {name: talker, runtimeProfile: cpu}, {name: code2wav, runtimeProfile: cpu}]"
    assert errors_of(spec + named, default="gone") == ()
    assert errors_of(spec + named, default="cuda") == (), "packaged weights and a CUDA default that nobody uses"


def test_the_entry_needs_its_profile_although_no_stage_uses_it() -> None:
    spec = 'model: {uri: "packaged://smol-omni"}\ntopology: smol_omni\nruntimeProfile: gone\nstages: '
    stages = [{"name": name, "runtimeProfile": "cpu"} for name in ("thinker", "talker", "code2wav")]
    found = errors_of(spec + json.dumps([*stages[:2], {**stages[2], "accelerator": {"class": "nvidia-l4"}}]))
    assert [e.path for e in found] == ["spec.runtimeProfile", "spec.stages[2].accelerator.class"], (
        "and all else is told"
    )
    assert [e.path for e in errors_of(spec + json.dumps(stages))] == ["spec.runtimeProfile"]


def test_the_profile_named_default_is_the_default() -> None:
    """As the API says of spec.runtimeProfile."""
    spec = 'model: {uri: "packaged://smol-omni"}\ntopology: smol_omni\n'
    profile = PROFILES["cpu"].model_copy(update={"metadata": ObjectMeta(name="default")})
    plan = resolve(a_pipeline(spec), {**PROFILES, "default": profile}, target="kubernetes")
    assert {s.profile for s in plan.stages} == {"default"}
    assert plan.origins["stages.thinker.profile"] == "default"


def test_shared_memory_is_fine_on_one_machine() -> None:
    spec = SMOL + "edges: [{from: talker, to: code2wav, connector: {type: SharedMemory}}]"
    assert errors_of(spec, target="local") == ()
    assert errors_of(spec, target="kubernetes") != ()


def test_a_claim_needs_a_cluster() -> None:
    spec = SMOL.replace("packaged://smol-omni", "pvc://weights/smol")
    assert errors_of(spec, target="kubernetes") == ()
    assert errors_of(spec, target="local") == (
        FieldError(
            "spec.model.uri",
            "pvc://weights/smol",
            "a claim exists only in a cluster",
            "use file:///PATH or hf://ORG/NAME here",
        ),
    )


def test_an_edge_that_cannot_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family of this version has such an edge; diffusion stages will."""
    topology = registry.TOPOLOGIES["qwen3_omni_moe"]
    whole = structs.replace(topology.edges[1], supports_async_chunk=False)
    other = structs.replace(topology, edges=(topology.edges[0], whole))
    monkeypatch.setattr(registry, "TOPOLOGIES", {topology.name: other})
    edge = resolve(a_pipeline(QWEN), PROFILES, target="kubernetes").edges[1]
    assert (edge.mode, edge.frames) == ("fullPayload", 0), "the default follows what the stage can do"
    (error,) = errors_of(QWEN + "edges: [{from: talker, to: code2wav, mode: asyncChunk}]")
    assert (error.path, error.value, error.fix) == (
        "spec.edges[0].mode",
        "asyncChunk",
        "use fullPayload, or remove the field",
    )
    assert "needs the whole codec_frames" in error.problem


def test_no_stage_emits_anything() -> None:
    """No engine of this version can make such a graph alone, since ar_vllm emits text; so the check is met directly."""
    from omni_runtime.deploy.overlay import Violations
    from omni_runtime.deploy.structure import resolve_structure
    from omni_runtime.topology.types import EngineKind, StageTemplate, Topology

    silent = Topology("silent", "", (StageTemplate("only", EngineKind.AR_VLLM),), ())
    bad = Violations()
    resolve_structure(a_pipeline(QWEN).spec, silent, bad)
    assert [(e.path, e.problem) for e in bad.found] == [("spec.stages", "no stage emits anything to the client")]
