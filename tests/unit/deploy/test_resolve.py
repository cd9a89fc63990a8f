"""What a pipeline resolves to: precedence, order, pods, connectors, chunks, and what a revision depends on."""

from __future__ import annotations

import json

import msgspec
import pytest

from omni_runtime.deploy.plan import RdmaPlan, ReplicaBounds, canonical_json, load_plan, revision_of
from omni_runtime.topology.types import Modality
from tests.unit.deploy.builders import CUSTOM, QWEN, SMOL, resolved

HIDDEN, THINKER = "{from: thinker, to: talker", "{name: thinker, runtimeProfile"
SPEECH_POD = "stages: [{name: talker, podGroup: speech}, {name: code2wav, podGroup: speech}]"


def test_nothing_but_model_topology_and_profile_is_needed() -> None:
    plan = resolved(SMOL)
    assert [s.name for s in plan.stages] == ["thinker", "talker", "code2wav"]
    assert [(e.name, e.connector, e.mode) for e in plan.edges] == [
        ("thinker->talker", "TCP", "asyncChunk"),
        ("talker->code2wav", "TCP", "asyncChunk"),
    ]
    assert plan.model.served_name == "speaker"
    assert plan.entry.port == 80


def test_text_needs_the_thinker_alone_and_audio_needs_all() -> None:
    plan = resolved(SMOL)
    assert [s.name for s in plan.stages_for(frozenset({Modality.TEXT}))] == ["thinker"]
    assert [s.name for s in plan.stages_for(frozenset({Modality.AUDIO}))] == ["thinker", "talker", "code2wav"]


def test_pipeline_beats_profile_beats_topology_and_each_value_says_where_it_is_from() -> None:
    plan = resolved(
        QWEN
        + """
stages:
- name: thinker
  accelerator: {class: nvidia-l4, count: 2, memoryFraction: "0.8"}
  resources: {cpu: "3"}
  engineArgs: [{name: max_model_len, value: "04096"}]
  scheduling: {nodeSelector: {pool: big}, priorityClassName: high}
"""
    )
    thinker = plan.stage("thinker")
    assert (thinker.device.device_class, thinker.device.count, thinker.device.memory_fraction) == ("nvidia-l4", 2, 0.8)
    assert thinker.tensor_parallel == 2, "the devices that are asked for are used"
    assert dict(thinker.engine_args) == {
        "enable_prefix_caching": "false",
        "max_model_len": "4096",
    }
    assert dict(thinker.node_selector) == {"pool": "big", "gpu": "l4"}
    assert thinker.env == (("A", "1"), ("B", "2"))
    assert thinker.image_pull_secrets == ("registry",)
    assert (thinker.image, thinker.connector_image, plan.entry.image) == ("omni-cuda", "omni-connector", "omni-entry")
    assert dict(plan.entry.node_selector) == {"pool": "serving"}, "the entry needs no device"
    expected = {
        "stages.thinker.cpu": "pipeline",
        "stages.thinker.memory": "topology qwen3_omni_moe",
        "stages.thinker.accelerator.class": "pipeline",
        "stages.talker.accelerator.class": "profile cuda",
        "stages.thinker.image": "profile cuda",
        "stages.thinker.engineArgs.max_model_len": "pipeline",
        "stages.thinker.engineArgs.enable_prefix_caching": "topology qwen3_omni_moe",
        "stages.thinker.parallelism.tensor": "pipeline accelerator.count",
        "edges.talker->code2wav.frames": "topology qwen3_omni_moe",
        "drain.timeoutSeconds": "default",
    }
    assert {key: plan.origins[key] for key in expected} == expected


def test_every_value_that_the_spec_can_set_has_an_origin() -> None:
    plan = resolved(QWEN + SPEECH_POD)
    for stage in plan.stages:
        for field in ("engine", "profile", "cpu", "memory", "sharedMemory", "maxConcurrency", "accelerator.count"):
            assert f"stages.{stage.name}.{field}" in plan.origins
    for edge in plan.edges:
        assert f"edges.{edge.name}.connector" in plan.origins


def test_parallelism_alone_asks_for_its_devices() -> None:
    thinker = resolved(QWEN + "stages: [{name: thinker, parallelism: {tensor: 4}}]").stage("thinker")
    assert (thinker.device.count, thinker.tensor_parallel, thinker.pipeline_parallel) == (4, 4, 1)


class TestPods:
    def test_stages_are_alone_unless_they_share_a_pod_group(self) -> None:
        assert {s.name: s.pod_group for s in resolved(QWEN).stages} == {n: n for n in ("thinker", "talker", "code2wav")}

    def test_the_leader_is_the_first_in_the_graph_however_the_stages_are_listed(self) -> None:
        backwards = "stages: [{name: code2wav, podGroup: speech}, {name: talker, podGroup: speech}]"
        for spec in (SPEECH_POD, backwards):
            plan = resolved(QWEN + spec)
            assert {k: [s.name for s in v] for k, v in plan.pod_groups().items()} == {
                "thinker": ["thinker"],
                "talker": ["talker", "code2wav"],
            }

    def test_auto_takes_shared_memory_within_a_pod_and_tcp_between_pods(self) -> None:
        assert {e.name: e.connector for e in resolved(QWEN + SPEECH_POD).edges} == {
            "thinker->talker": "TCP",
            "talker->code2wav": "SharedMemory",
        }

    def test_auto_takes_mooncake_where_both_profiles_list_it(self) -> None:
        pod = "stages: [{name: thinker, podGroup: a}, {name: talker, podGroup: s}, {name: code2wav, podGroup: s}]"
        everywhere = resolved(QWEN + "runtimeProfile: rdma\n" + pod)
        assert [e.connector for e in everywhere.edges] == ["Mooncake", "SharedMemory"]
        one_end = resolved(QWEN + "stages: [{name: thinker, runtimeProfile: rdma}]")
        assert [e.connector for e in one_end.edges] == ["TCP", "TCP"]
        asked = "edges: [{from: thinker, to: talker, connector: {type: TCP}}]"
        assert resolved(QWEN + "runtimeProfile: rdma\n" + asked).edges[0].connector == "TCP"

    @pytest.mark.parametrize(
        ("thinker", "talker", "connector"),
        [
            pytest.param("ib", "ib", "Mooncake", id="RDMA at both ends"),
            pytest.param("ib", "ib-other", "Mooncake", id="RDMA of two profiles"),
            pytest.param("mooncake-tcp", "rdma", "Mooncake", id="TCP, said and not said"),
            pytest.param("ib", "mooncake-tcp", "TCP", id="RDMA and TCP"),
            pytest.param("rdma", "ib", "TCP", id="TCP and RDMA"),
            pytest.param("ib", "cuda", "TCP", id="one profile without Mooncake"),
        ],
    )
    def test_auto_takes_mooncake_only_between_ends_that_understand_each_other(
        self, thinker: str, talker: str, connector: str
    ) -> None:
        """An engine that sends by RDMA has no way to one that listens on TCP: the edge would fall back at every fetch."""
        ends = f"stages: [{{name: thinker, runtimeProfile: {thinker}}}, {{name: talker, runtimeProfile: {talker}}}]"
        assert resolved(QWEN + ends).edges[0].connector == connector
        if connector == "Mooncake":
            asked = "\nedges: [{from: thinker, to: talker, connector: {type: Mooncake}}]"
            assert resolved(QWEN + ends + asked).edges[0].connector == "Mooncake"

    def test_what_mooncake_sends_by_is_part_of_the_revision(self) -> None:
        ib, again, other, tcp, unsaid = (
            resolved(f"{QWEN}runtimeProfile: {name}")
            for name in ("ib", "ib-reordered", "ib-other", "mooncake-tcp", "rdma")
        )
        assert {s.rdma for s in ib.stages} == {RdmaPlan(("mlx5_0", "mlx5_1"), "rdma/hca", 2)}
        assert {s.rdma for s in other.stages} == {RdmaPlan((), "rdma/hca_b", 1)}
        assert ib.origins["stages.thinker.mooncake"] == "profile ib"
        assert {s.rdma for p in (tcp, unsaid) for s in p.stages} == {None}
        first, second = (msgspec.structs.replace(s, profile="") for s in (ib.stage("thinker"), again.stage("thinker")))
        assert first == second, "a set: its order makes no other revision"

    def test_a_plan_that_was_stored_before_there_was_rdma_is_read(self) -> None:
        """T58: ConfigMaps of revisions that still run were written by the operator before."""
        plan = resolved(QWEN)
        stored = json.loads(canonical_json(plan))
        for stage in stored["stages"]:
            del stage["rdma"]
        assert load_plan(json.dumps(stored).encode()) == plan

    @pytest.mark.parametrize(
        ("spec", "edges"),
        [
            pytest.param("", "TCP near, TCP near", id="nothing said"),
            pytest.param(f"edges: [{HIDDEN}, connector: {{type: Auto}}}}]", "TCP near, TCP near", id="Auto"),
            pytest.param(f"edges: [{HIDDEN}, connector: {{type: TCP}}}}]", "TCP, TCP near", id="TCP asked for"),
            pytest.param(f"stages: [{THINKER}: near-rdma}}]", "TCP near, TCP near", id="two profiles, one folder"),
            pytest.param(f"stages: [{THINKER}: near-elsewhere}}]", "TCP, TCP near", id="another folder"),
            pytest.param(f"stages: [{THINKER}: cuda}}]", "TCP, TCP near", id="one profile without"),
            pytest.param(f"stages: [{THINKER}: near-tcp-only}}]", "TCP, TCP near", id="no shared memory in a profile"),
            pytest.param(SPEECH_POD, "TCP near, SharedMemory", id="in one pod"),
            pytest.param("runtimeProfile: near-rdma", "Mooncake near, Mooncake near", id="Mooncake between nodes"),
            pytest.param("runtimeProfile: cuda", "TCP, TCP", id="no profile with one"),
        ],
    )
    def test_auto_shares_memory_on_a_node_where_both_profiles_allow_one_folder(self, spec: str, edges: str) -> None:
        """Both ends must see the same files: else the consumer would look for a socket that is not there (R62)."""
        plan = resolved(f"{QWEN}runtimeProfile: near\n{spec}")
        assert ", ".join(f"{e.connector} near" if e.near else e.connector for e in plan.edges) == edges

    def test_the_folder_of_the_node_is_part_of_the_revision(self) -> None:
        near, elsewhere = (resolved(f"{QWEN}runtimeProfile: {name}") for name in ("near", "near-elsewhere"))
        assert {s.node_local_host_path for s in near.stages} == {"/run/omni"}
        assert near.origins["stages.thinker.nodeLocalVolume"] == "profile near"
        assert all(not e.near for e in resolved(f"{QWEN}runtimeProfile: near", target="local").edges)
        assert near.revision != elsewhere.revision

    def test_one_machine_shares_memory_everywhere_unless_told_otherwise(self) -> None:
        assert {e.connector for e in resolved(QWEN, target="local").edges} == {"SharedMemory"}
        tcp = "edges: [{from: thinker, to: talker, connector: {type: TCP}}]"
        assert resolved(QWEN + tcp, target="local").edges[0].connector == "TCP"

    def test_a_pod_has_one_count(self) -> None:
        plan = resolved(QWEN + "stages: [{name: talker, podGroup: g}, {name: code2wav, podGroup: g, replicas: 3}]")
        assert plan.replicas["talker"] == plan.replicas["code2wav"] == ReplicaBounds(3, 0, None)

    def test_the_devices_of_a_pod_are_counted_once(self) -> None:
        assert resolved(QWEN + SPEECH_POD + "\nbudget: {accelerators: 2}").pipeline == "speaker"


@pytest.mark.parametrize(
    ("stage", "bounds", "initial"),
    [
        pytest.param("{name: talker}", ReplicaBounds(None, 1, None), 1, id="nothing said"),
        pytest.param("{name: talker, replicas: 0}", ReplicaBounds(0, 0, None), 0, id="none wanted"),
        pytest.param("{name: talker, replicas: 3}", ReplicaBounds(3, 0, None), 3, id="a fixed count"),
        pytest.param(
            "{name: talker, scaling: {minReplicas: 2, maxReplicas: 5}}", ReplicaBounds(None, 2, 5), 2, id="a range"
        ),
    ],
)
def test_replica_bounds(stage: str, bounds: ReplicaBounds, initial: int) -> None:
    found = resolved(QWEN + f"stages: [{stage}]").replicas["talker"]
    assert found == bounds
    assert found.initial == initial


class TestChunks:
    def test_codec_frames_have_sizes_and_hidden_rows_come_as_they_are(self) -> None:
        hidden, codec = resolved(QWEN).edges
        assert (hidden.initial_frames, hidden.frames, hidden.left_context_frames) == (0, 0, 0)
        assert (codec.initial_frames, codec.frames, codec.left_context_frames) == (4, 25, 28)

    def test_small_frames_shrink_the_first_chunk_too(self) -> None:
        edge = resolved(QWEN + "edges: [{from: talker, to: code2wav, chunk: {frames: 2}}]").edges[1]
        assert (edge.initial_frames, edge.frames) == (2, 2)

    def test_full_payload_has_no_chunks(self) -> None:
        edge = resolved(QWEN + "edges: [{from: talker, to: code2wav, mode: fullPayload}]").edges[1]
        assert (edge.mode, edge.frames) == ("fullPayload", 0)
        assert edge.left_context_frames == 28, "a long message is decoded in pieces"

    @pytest.mark.parametrize("sizing", ["fixed", "ramp", "adaptive"])
    def test_sizing_is_part_of_the_plan(self, sizing: str) -> None:
        plan = resolved(QWEN + f"edges: [{{from: talker, to: code2wav, chunk: {{sizing: {sizing}}}}}]")
        assert plan.edges[1].sizing == sizing
        assert (plan.edges[1].initial_frames, plan.edges[1].frames) == (4, 25)
        assert resolved(QWEN).edges[1].sizing == "fixed"


class TestCustom:
    GRAPH = """
stages: [{name: write, engine: ar_vllm}, {name: speak, engine: hibari_acoustic}, {name: sound, engine: hibari_vocoder}]
edges: [{from: write, to: speak}, {from: speak, to: sound}]
"""

    def test_payloads_outputs_and_order_follow_from_the_engines(self) -> None:
        plan = resolved(CUSTOM + self.GRAPH)
        assert [s.name for s in plan.stages] == ["write", "speak", "sound"]
        assert [(e.name, str(e.payload)) for e in plan.edges] == [
            ("write->speak", "text_segments"),
            ("speak->sound", "acoustic_frames"),
        ]
        assert [(s.emits, s.required_for) for s in plan.stages] == [
            ((Modality.TEXT,), (Modality.TEXT, Modality.AUDIO)),
            ((), (Modality.AUDIO,)),
            ((Modality.AUDIO,), (Modality.AUDIO,)),
        ]

    def test_what_is_not_spelled_out_is_a_default(self) -> None:
        assert resolved(CUSTOM + self.GRAPH).origins["stages.speak.memory"] == "default"

    def test_one_thinker_may_feed_two_talkers(self) -> None:
        plan = resolved(
            CUSTOM
            + """
stages:
- {name: write, engine: ar_vllm}
- {name: speak-a, engine: hibari_acoustic}
- {name: sound-a, engine: hibari_vocoder}
- {name: speak-b, engine: hibari_acoustic}
- {name: sound-b, engine: hibari_vocoder}
edges:
- {from: speak-b, to: sound-b}
- {from: speak-a, to: sound-a}
- {from: write, to: speak-b}
- {from: write, to: speak-a}
"""
        )
        assert [s.name for s in plan.stages] == ["write", "speak-a", "sound-a", "speak-b", "sound-b"]
        assert plan.stage("write").required_for == (Modality.TEXT, Modality.AUDIO)


class TestRevision:
    def test_it_survives_a_round_trip_through_the_config_map(self) -> None:
        plan = resolved(QWEN)
        again = load_plan(canonical_json(plan))
        assert again == plan
        assert revision_of(again) == plan.revision

    @pytest.mark.parametrize(
        "spec",
        [
            "stages: [{name: thinker, replicas: 7}]",
            "stages: [{name: thinker, scaling: {minReplicas: 1, maxReplicas: 9}}]",
            "objectives: {ttfpMilliseconds: {p95: 800}}",
            "budget: {accelerators: 90}",
            "rollout: {strategy: Recreate}",
        ],
    )
    def test_what_pods_do_not_depend_on_restarts_nothing(self, spec: str) -> None:
        assert resolved(QWEN + spec).revision == resolved(QWEN).revision

    def test_spelling_out_a_default_restarts_nothing(self) -> None:
        spelled = (
            "stages: [{name: talker, maxConcurrency: 64}]\nedges: [{from: talker, to: code2wav, chunk: {frames: 25}}]"
        )
        assert resolved(QWEN + spelled).revision == resolved(QWEN).revision

    @pytest.mark.parametrize(
        "spec",
        [
            "stages: [{name: thinker, resources: {cpu: '3'}}]",
            "stages: [{name: thinker, engineArgs: [{name: seed, value: '1'}]}]",
            "stages: [{name: thinker, accelerator: {class: nvidia-l4}}]",
            "edges: [{from: talker, to: code2wav, chunk: {frames: 20}}]",
            SPEECH_POD,
            "stages: [{name: thinker, scaling: {minReplicas: 0, maxReplicas: 9}}]",  # the entry has to know who sleeps
        ],
    )
    def test_what_pods_depend_on_makes_a_new_one(self, spec: str) -> None:
        assert resolved(QWEN + spec).revision != resolved(QWEN).revision


@pytest.mark.parametrize("name", ["a." * 126 + "a", "x" * 253, "v1.2"], ids=["dots", "253 characters", "short"])
def test_long_names_and_dots_are_names(name: str) -> None:
    """Children get shortened names; the plan keeps the name as it is (T4, T5)."""
    plan = resolved(SMOL, name=name)
    assert plan.pipeline == plan.model.served_name == name


def test_what_the_entry_does_with_requests_is_in_the_plan() -> None:
    plain = resolved(SMOL).entry
    assert (plain.routing, plain.replays, plain.admin, plain.tenant_header) == (
        "LeastQueue",
        1,
        "Disabled",
        "x-omni-tenant",
    )
    assert (plain.max_per_tenant, plain.otlp_endpoint, plain.request_timeout_seconds) == (None, None, 600)
    plan = resolved(
        SMOL
        + """
entry:
  maxPerTenant: 4
  tenantHeader: x-team
  requestTimeoutSeconds: 30
  routing: SessionAffine
  replays: 0
  admin: Loopback
  otlpEndpoint: http://collector:4318
  allowedMediaDomains: [media.example.com, cdn.example.com]
"""
    )
    entry = plan.entry
    assert (entry.max_per_tenant, entry.tenant_header, entry.request_timeout_seconds) == (4, "x-team", 30)
    assert (entry.routing, entry.replays, entry.admin) == ("SessionAffine", 0, "Loopback")
    assert entry.otlp_endpoint == "http://collector:4318"
    assert (plain.allowed_media_domains, entry.allowed_media_domains) == ((), ("cdn.example.com", "media.example.com"))
    assert (plan.origins["entry.routing"], plan.origins["entry.maxQueue"]) == ("pipeline", "default")
