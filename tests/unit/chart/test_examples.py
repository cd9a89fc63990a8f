"""Every example resolves with the profiles that the chart installs, to the pods that its comments promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_runtime.deploy.load import load_pipeline, load_profiles
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.resolve import resolve
from tests.unit.chart.render import CHART, UniqueKeys

EXAMPLES = CHART.parents[1] / "examples"
PIPELINES = sorted(EXAMPLES.glob("*.pipeline.yaml"))


def chart_profiles() -> dict[str, OmniRuntimeProfile]:
    """As templates/profiles.yaml makes them, without helm; test_chart.py compares that with the real rendering."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return {
        name: OmniRuntimeProfile.model_validate(
            {
                "metadata": {"name": name},
                "spec": {**profile, "images": {"runtime": f"omni-operator/{profile['image']}"}},
            }
        )
        for name, profile in values["profiles"].items()
    }


def plan_of(name: str) -> ResolvedPlan:
    return resolve(load_pipeline(EXAMPLES / f"{name}.pipeline.yaml"), chart_profiles(), target="kubernetes")


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.name)
def test_every_pipeline_resolves_on_a_cluster(path: Path) -> None:
    plan = resolve(load_pipeline(path), chart_profiles(), target="kubernetes")
    assert len(plan.stages) == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_every_file_is_yaml_that_teaches(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# "), "an example says first what it shows"
    assert list(yaml.load_all(text, Loader=UniqueKeys))


def test_smol_omni_leaves_the_counts_to_whoever_scales() -> None:
    text = (EXAMPLES / "smol-omni.pipeline.yaml").read_text()
    assert "replicas" not in str(yaml.safe_load(text)), "a count in the manifest would be applied again (T13)"
    assert list(plan_of("smol-omni").pod_groups()) == ["thinker", "talker", "code2wav"]


def test_tiny_qwen_speaks_over_shared_memory_and_thinks_over_tcp() -> None:
    plan = plan_of("qwen3-omni-tiny")
    assert [(e.name, e.connector) for e in plan.edges] == [
        ("thinker->talker", "TCP"),
        ("talker->code2wav", "SharedMemory"),
    ]


@pytest.mark.parametrize(
    ("name", "resource", "thinker_devices", "selector"),
    [
        ("qwen3-omni", "nvidia.com/gpu", 2, ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3")),
        ("qwen3-omni.rocm", "amd.com/gpu", 1, ("amd.com/gpu.product-name", "AMD_Instinct_MI300X_OAM")),
        ("qwen3-omni.npu", "huawei.com/Ascend910B", 2, ("accelerator", "huawei-Ascend910")),
    ],
)
def test_real_weights_go_to_the_right_devices(
    name: str, resource: str, thinker_devices: int, selector: tuple[str, str]
) -> None:
    plan = plan_of(name)
    assert {s.device.resource_name for s in plan.stages} == {resource}
    assert all(selector in s.node_selector for s in plan.stages)
    thinker = plan.stage("thinker")
    assert thinker.device.count == thinker.tensor_parallel == thinker_devices
    assert {k: [s.name for s in v] for k, v in plan.pod_groups().items()} == {
        "thinker": ["thinker"],
        "talker": ["talker", "code2wav"],
    }
    assert (plan.replicas["code2wav"].minimum, plan.replicas["code2wav"].maximum) == (1, 8)


def test_custom_is_smol_omni_under_other_names() -> None:
    custom, smol = plan_of("custom"), plan_of("smol-omni")
    assert [(s.engine, s.emits, s.required_for, s.cpu, s.memory, s.engine_args) for s in custom.stages] == [
        (s.engine, s.emits, s.required_for, s.cpu, s.memory, s.engine_args) for s in smol.stages
    ]
    assert [(e.payload, e.mode, e.frames) for e in custom.edges] == [(e.payload, e.mode, e.frames) for e in smol.edges]


def test_the_profile_of_ones_own_is_a_profile() -> None:
    (profile,) = load_profiles(EXAMPLES / "profiles" / "cuda-mig.yaml").values()
    assert profile.spec.default_device_class in {c.name for c in profile.spec.device_classes}


def test_the_profile_with_rdma_makes_pods_that_ask_for_it() -> None:
    profiles = load_profiles(EXAMPLES / "profiles" / "cuda-rdma.yaml")
    pipeline = load_pipeline(EXAMPLES / "qwen3-omni.pipeline.yaml")
    spec = pipeline.spec.model_copy(update={"runtime_profile": "cuda-rdma"})
    plan = resolve(pipeline.model_copy(update={"spec": spec}), profiles, target="kubernetes")
    assert "Mooncake" in {e.connector for e in plan.edges}
    (rdma,) = {s.rdma for s in plan.stages}
    assert rdma is not None
    assert (rdma.devices, rdma.resource_name) == (("mlx5_0", "mlx5_1"), "rdma/hca_shared_devices_a")
