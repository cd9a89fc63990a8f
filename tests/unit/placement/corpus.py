"""Pipelines and clusters with the verdict that they must get: every constraint, every vendor. One entry a line of thought."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.placement import ClusterView, ConstraintKind, NodeView, QuotaView, TenantView
from tests.unit.placement.builders import a_cluster, a_node, a_pipeline, a_taint, custom, example, qwen


@dataclass(frozen=True, slots=True)
class Case:
    """expect: the constraint, or None for a feasible one. says: words of the message. advises: words of the first fix."""

    name: str
    pipeline: OmniPipeline
    cluster: ClusterView
    expect: ConstraintKind | None = None
    says: tuple[str, ...] = ()
    advises: str = ""
    warns: tuple[str, ...] = field(default=())


K = ConstraintKind
H100, H200, A100, L4, L40S = "nvidia-h100-80gb", "nvidia-h200", "nvidia-a100-80gb", "nvidia-l4", "nvidia-l40s"
MI300X, ASCEND = "amd-mi300x", "ascend-910b"


def h100(count: int, per_node: int = 8, **more: object) -> ClusterView:
    return a_cluster(*(a_node(f"h{i}", H100, per_node) for i in range(count)), **more)


def at(stage: str, rest: str) -> str:
    return f"{{name: {stage}, {rest}}}"


def on(device: str, more: str = "") -> str:
    return f"accelerator: {{class: {device}{more}}}"


ONE_POD = (
    "[{name: thinker, podGroup: all, accelerator: {class: %s, memoryFraction: '%s'}},"
    " {name: talker, podGroup: all, accelerator: {class: %s, memoryFraction: '%s'}},"
    " {name: code2wav, podGroup: all, accelerator: {class: %s, memoryFraction: '%s'}}]"
)
TWO_H100 = f"[{at('thinker', on(H100))}, {at('talker', 'podGroup: s, ' + on(H100))}, {at('code2wav', 'podGroup: s, ' + on(H100))}]"
TIGHT = a_node("small", H100, 3, cpu=4, memory=512)
WRITER = f"[{{name: writer, engine: ar_vllm, {on(H100)}%s}}]"
LLAMA_70B = "hf://meta-llama/Llama-3.1-70B-Instruct"


def writer(more: str = "", uri: str = "hf://meta-llama/Llama-3.1-8B-Instruct", device: str = H100) -> OmniPipeline:
    return custom(f"[{{name: writer, engine: ar_vllm, {on(device)}{more}}}]", uri=uri)


def args(**values: object) -> str:
    return ", engineArgs: [" + ", ".join(f"{{name: {k}, value: '{v}'}}" for k, v in values.items()) + "]"


def used(node: NodeView, **amounts: int) -> NodeView:
    return replace(node, used={k.replace("gpu", "nvidia.com/gpu"): v for k, v in amounts.items()})


CASES: tuple[Case, ...] = (
    # ---- feasible, all vendors
    Case("qwen3-omni on two nodes of two H100", example("qwen3-omni"), h100(2, 2), warns=("MaxReplicasDoNotFit",)),
    Case("thinker and speech on 2 x H100", qwen(TWO_H100), h100(1, 2)),
    Case("mi300x holds all three stages of one pod", qwen(ONE_POD % (MI300X, "0.55", MI300X, "0.2", MI300X, "0.1"), "rocm"),
         a_cluster(a_node("m", MI300X, 1))),
    Case("rocm example", example("qwen3-omni.rocm"), a_cluster(a_node("m", MI300X, 8))),
    Case("ascend example", example("qwen3-omni.npu"), a_cluster(a_node("a", ASCEND, 8))),
    Case("one H200 holds the thinker, one H100 the speech",
         qwen(f"[{at('thinker', on(H200))}, {at('talker', 'podGroup: s, ' + on(H100))}, {at('code2wav', 'podGroup: s, ' + on(H100))}]"),
         a_cluster(a_node("x", H200, 1), a_node("y", H100, 1))),
    Case("mixed vendors per stage",
         qwen(f"[{at('thinker', 'runtimeProfile: rocm, ' + on(MI300X))}, {at('talker', on(H100))}, "
              f"{at('code2wav', 'runtimeProfile: npu, ' + on(ASCEND, ', memoryFraction: 0.2').replace('0.2', chr(39) + '0.2' + chr(39)))}]"),
         a_cluster(a_node("m", MI300X, 1), a_node("h", H100, 1), a_node("a", ASCEND, 1))),
    Case("real speech on one small CPU node", example("smol-omni"), a_cluster(a_node("n", cpu=2, memory=8))),
    Case("tiny model in pod groups", example("qwen3-omni-tiny"), a_cluster(a_node("n", cpu=2, memory=16))),
    Case("custom graph", example("custom"), a_cluster(a_node("n", cpu=2, memory=16))),
    Case("limits are more than a node has", example("qwen3-omni"), a_cluster(a_node("h", H100, 3, memory=150)), warns=("MemoryOvercommitted",)),
    Case("no node is known", example("qwen3-omni"), ClusterView()),
    Case("8B on one L4", writer(", maxConcurrency: 32" + args(max_model_len=8192), device=L4), a_cluster(a_node("l", L4, 1)), warns=("KvCacheSmall",)),
    Case("70B over four H100", writer(", parallelism: {tensor: 4}" + args(max_model_len=32768), LLAMA_70B), h100(1, 4)),
    Case("70B over tensor 4 x pipeline 2", writer(", parallelism: {tensor: 4, pipeline: 2}" + args(max_model_len=32768), LLAMA_70B), h100(1)),
    Case("what runs already leaves enough", qwen(TWO_H100), a_cluster(used(a_node("h", H100, 8), gpu=6, cpu=4000))),
    Case("tolerated taint", example("qwen3-omni"), a_cluster(a_node("h", H100, 3, taints=(a_taint("nvidia.com/gpu", "present"),)),)),
    Case("quota with room", qwen(TWO_H100), h100(1, 2, quotas=(QuotaView("q", {"requests.nvidia.com/gpu": 2, "pods": 10}),))),
    Case("budget with room", qwen(TWO_H100), h100(1, 2, tenant=TenantView("t", {H100: 4}, {H100: 2}))),
    Case("a class without a budget has no limit", qwen(TWO_H100), h100(1, 2, tenant=TenantView("t", {H200: 0}))),
    Case("zero replicas ask for nothing", qwen("[{name: talker, replicas: 0}, {name: code2wav, replicas: 0}]"), h100(1, 1)),
    Case("weights unknown", custom(f"[{{name: writer, engine: ar_vllm, {on(L4)}}}]", uri="hf://someone/secret"),
         a_cluster(a_node("l", L4, 1)), warns=("WeightsUnknown",)),
    Case("fp8 cache on H100", writer(args(kv_cache_dtype="fp8", max_model_len=8192)), h100(1, 1)),
    Case("fp8 weights on A100 are unpacked", writer(args(quantization="fp8", max_model_len=8192), device=A100),
         a_cluster(a_node("a", A100, 1)), warns=("QuantizationUnpacked",)),
    Case("key-value heads are copied", writer(", parallelism: {tensor: 16}"), h100(1, 16), warns=("KeyValueHeadsCopied",)),
    Case("facts are old", qwen(TWO_H100), h100(1, 2, age_seconds=300.0), warns=("FactsOld",)),
    # ---- memory of a device
    Case("thinker on one L4", qwen(f"[{at('thinker', on(L4))}, {at('talker', on(L4))}, {at('code2wav', on(L4))}]"),
         a_cluster(a_node("l", L4, 1)), K.DEVICE_MEMORY, ("thinker needs", "GiB are missing", "talker needs"), "thinker"),
    Case("thinker on one A100 40", qwen(f"[{at('thinker', on('nvidia-a100-40gb'))}]"), h100(1), K.DEVICE_MEMORY, ("thinker",)),
    Case("thinker's fraction is too small", qwen("[{name: thinker, accelerator: {class: nvidia-h100-80gb, memoryFraction: '0.7'}}]"),
         h100(1), K.DEVICE_MEMORY, ("0.7 of 79.1 GiB",), "accelerator.memoryFraction of thinker to 0."),
    Case("talker with too many slots", qwen("[{name: talker, maxConcurrency: 512}]"), h100(1), K.DEVICE_MEMORY,
         ("KV slots",), "talker"),
    Case("70B on one H100", writer(args(max_model_len=8192), LLAMA_70B), h100(1), K.DEVICE_MEMORY, ("writer needs",),
         "parallelism.tensor of writer to 4"),
    Case("70B on two L4", writer(", parallelism: {tensor: 2}" + args(max_model_len=8192), LLAMA_70B, L4),
         a_cluster(*(a_node(f"l{i}", L4, 8) for i in range(2))), K.DEVICE_MEMORY, ("on each device",)),
    Case("a context that no cache holds", writer(args(max_model_len=131072), device=L4), a_cluster(a_node("l", L4, 1)),
         K.DEVICE_MEMORY, ("KV cache",), "max_model_len"),
    Case("DeepSeek-V3 on eight H100", writer(", parallelism: {tensor: 8}" + args(max_model_len=8192), "hf://deepseek-ai/DeepSeek-V3"),
         h100(4), K.DEVICE_MEMORY, ("weights",)),
    Case("two engines in one pod of one MI300X ask for too little",
         qwen(ONE_POD % (MI300X, "0.3", MI300X, "0.2", MI300X, "0.1"), "rocm"), a_cluster(a_node("m", MI300X, 1)),
         K.DEVICE_MEMORY, ("thinker",), "memoryFraction of thinker to 0.3"),
    Case("a CPU stage with too little RAM",
         custom("[{name: writer, engine: ar_vllm, runtimeProfile: cpu, accelerator: {class: cpu}, resources: {memory: 4Gi}, "
                "engineArgs: [{name: max_model_len, value: '1024'}]}]"),
         a_cluster(a_node("n")), K.DEVICE_MEMORY, ("writer needs",), "resources.memory"),
    Case("a fine-tune has the sizes of its family",
         a_pipeline(f'model: {{uri: "pvc://models/my-omni"}}\ntopology: qwen3_omni_moe\nruntimeProfile: cuda\nstages: [{at("thinker", on(L40S))}]'),
         h100(1), K.DEVICE_MEMORY, ("sizes of the topology's own model", "accelerator.memory")),
    Case("a quantized copy is smaller than the table says",
         a_pipeline(f'model: {{uri: "hf://someone/Qwen3-Omni-30B-A3B-Instruct-AWQ-4bit"}}\ntopology: qwen3_omni_moe\nruntimeProfile: cuda\nstages: [{at("thinker", on(L40S))}]'),
         a_cluster(a_node("l", L40S, 1), a_node("h", H100, 8)), warns=("WeightsUnknown",)),
    Case("declared memory that fits", custom(f"[{{name: writer, engine: ar_vllm, {on(L4, ', memory: 18Gi')}}}]", uri="hf://someone/secret"),
         a_cluster(a_node("l", L4, 1))),
    Case("declared memory that does not fit", custom(f"[{{name: writer, engine: ar_vllm, {on(L4, ', memory: 20Gi')}}}]", uri="hf://someone/secret"),
         a_cluster(a_node("l", L4, 1), a_node("h", H100, 1)), K.DEVICE_MEMORY, ("declared 20.0",), "memoryFraction of writer to 0.91"),
    # ---- what devices and models cannot do
    Case("fp8 cache on A100", writer(args(kv_cache_dtype="fp8"), device=A100), a_cluster(a_node("a", A100, 1)),
         K.INCOMPATIBLE, ("has no fp8",), "use auto"),
    Case("fp8 weights on Ascend",
         custom(f"[{{name: writer, engine: ar_vllm, runtimeProfile: npu, {on(ASCEND)}{args(quantization='fp8')}}}]"),
         a_cluster(a_node("a", ASCEND, 1)), K.INCOMPATIBLE, ("ascend-910b has no fp8",), "remove it"),
    Case("tensor does not divide the heads", writer(", parallelism: {tensor: 3}"), h100(1), K.INCOMPATIBLE, ("32 attention heads",)),
    Case("tensor divides heads but not key-value heads", qwen("[{name: thinker, parallelism: {tensor: 16}}]"),
         h100(2, 16), None, warns=("KeyValueHeadsCopied",)),
    Case("more pipeline ranks than layers", writer(", parallelism: {pipeline: 40}"), h100(1), K.INCOMPATIBLE, ("32 layers",)),
    Case("longer than the model knows", writer(args(max_model_len=200_000)), h100(1), K.INCOMPATIBLE, ("131072 positions",), "131072"),
    Case("a cache that holds no request of full length", writer(args(kv_cache_memory_bytes=1 << 20, max_model_len=8192)), h100(1),
         K.INCOMPATIBLE, ("8192 positions takes 1073741824",), "use at least 1073741824"),
    Case("what the worker gives vLLM on a CPU holds no request of full length",
         custom("[{name: writer, engine: ar_vllm, runtimeProfile: cpu, accelerator: {class: cpu}, resources: {memory: 64Gi}}]"),
         a_cluster(a_node("n")), K.INCOMPATIBLE, ("131072 positions",), "use at least 17179869184"),
    Case("a step that cannot take every request", writer(", maxConcurrency: 64" + args(max_num_batched_tokens=32, max_model_len=8192)), h100(1),
         K.INCOMPATIBLE, ("64 tokens",), "use at least 64"),
    Case("a step that cannot take a whole prompt",
         writer(args(max_num_batched_tokens=4096, max_model_len=8192, enable_chunked_prefill="false")), h100(1),
         K.INCOMPATIBLE, ("8192 tokens",), "use at least 8192"),
    Case("weights that are kept in more host memory than there is", writer(args(cpu_offload_gb=1000, max_model_len=8192)), h100(1),
         K.INCOMPATIBLE, ("resources.memory is",), "use at most"),
    Case("a count of devices that does not divide the heads", qwen("[{name: thinker, accelerator: {class: nvidia-h100-80gb, count: 3}}]"), h100(1),
         K.INCOMPATIBLE, ("spec.stages[0].accelerator.count",), "set parallelism.tensor of thinker to 1, and accelerator.count to 1"),
    Case("of the divisors those on which the model fits", writer(", parallelism: {tensor: 3}" + args(max_model_len=8192), LLAMA_70B), h100(1),
         K.INCOMPATIBLE, ("64 attention heads",), "set parallelism.tensor of writer to 4"),
    Case("more than four things at once",
         qwen("[{name: thinker, replicas: 1}, {name: talker, accelerator: {class: nvidia-l40s}}, {name: code2wav, replicas: 20, accelerator: {class: nvidia-l4}}]"),
         a_cluster(a_node("x", H200, 8, cpu=8), a_node("y", H200, 8)), K.DEVICE_MEMORY, ("code2wav needs",), "of code2wav to"),
    Case("the API where the control channel listens",
         custom(WRITER % args(max_model_len=8192), more="entry: {port: 5500}"), h100(1), K.INCOMPATIBLE, ("control channel",), "8000"),
    # ---- nodes
    Case("no node of the class", qwen(TWO_H100), a_cluster(a_node("l", L4, 8)), K.NO_NODE, ("none of the 1 nodes is labelled",), "add a node"),
    Case("an empty cluster", qwen(TWO_H100), a_cluster(), K.NO_NODE, ("no node that takes pods",), "add"),
    Case("cordoned nodes do not count", qwen(TWO_H100), a_cluster(a_node("h", H100, 8, schedulable=False)), K.NO_NODE),
    Case("a taint that nobody tolerates", qwen(TWO_H100), a_cluster(a_node("h", H100, 8, taints=(a_taint("team", "other"),))),
         K.NO_NODE, ("team=other:NoSchedule",)),
    Case("an own label that no node has", qwen("[{name: thinker, scheduling: {nodeSelector: {pool: fast}}}]"), h100(1), K.NO_NODE, ("pool=fast",)),
    Case("devices of the right name that are too small",
         custom(WRITER % args(max_model_len=8192)),
         a_cluster(a_node("h", H100, 1, labels={"nvidia.com/gpu.memory": "12288"})), K.NO_NODE, ("have 12 GiB",)),
    Case("a replica that no node holds", qwen("[{name: thinker, parallelism: {tensor: 8}}]"), h100(4, 4), K.NODE_TOO_SMALL,
         ("8 x nvidia.com/gpu (largest: 4)", "does not span nodes"), "parallelism.tensor of thinker to 4"),
    Case("more CPU than a node has", qwen("[{name: thinker, resources: {cpu: '80'}}]"), h100(2), K.NODE_TOO_SMALL, ("CPUs",), "resources.cpu"),
    Case("three devices asked, two there", example("qwen3-omni"), h100(1, 2), K.CAPACITY, ("= 3 x nvidia.com/gpu",), "parallelism.tensor of thinker to 1"),
    Case("too many replicas", qwen("[{name: thinker, replicas: 9}, {name: talker, replicas: 1}]"), h100(1), K.CAPACITY,
         ("thinker: 9 replicas",), "replicas of thinker to "),
    Case("minimum of a range", qwen("[{name: thinker, scaling: {minReplicas: 6, maxReplicas: 9}}]"), h100(1, 4), K.CAPACITY,
         ("thinker",), "scaling.minReplicas of thinker to "),
    Case("others hold the devices", qwen(TWO_H100), a_cluster(used(a_node("h", H100, 8), gpu=7)), K.CAPACITY, ("1 left",)),
    Case("CPU of the whole cluster", example("smol-omni"), a_cluster(a_node("n", cpu=0.5, memory=16)), K.CAPACITY, ("CPUs",)),
    Case("pods of a node", example("smol-omni"), a_cluster(a_node("n", resources={"pods": 3})), K.CAPACITY, ("pods",)),
    Case("enough in sum, not in one place", qwen("[{name: thinker, parallelism: {tensor: 4}, replicas: 3}, {name: talker, replicas: 0}, {name: code2wav, replicas: 0}]"),
         h100(2, 6), K.CAPACITY, ("thinker: 3 replicas",)),
    Case("scattered devices",
         qwen("[{name: thinker, parallelism: {tensor: 4}, replicas: 2}, {name: talker, replicas: 2, podGroup: s, accelerator: {class: nvidia-h100-80gb, memoryFraction: '0.6'}}, "
              "{name: code2wav, podGroup: s, accelerator: {class: nvidia-h100-80gb, memoryFraction: '0.1'}}]"),
         a_cluster(a_node("a", H100, 5, cpu=30), a_node("b", H100, 5, cpu=11)), K.FRAGMENTATION, ("not on single nodes",), "replicas of thinker"),
    Case("memory of one node here, CPU of another there", example("smol-omni"),
         a_cluster(a_node("a", cpu=8, memory=2), a_node("b", cpu=0.3, memory=32)), K.NODE_TOO_SMALL, ("one node that has all of it",)),
    Case("fragments",
         qwen("[{name: thinker, parallelism: {tensor: 2}, replicas: 2}, {name: talker, replicas: 2}, {name: code2wav, replicas: 0}]"),
         a_cluster(a_node("a", H100, 3), a_node("b", H100, 3)), None),
    # ---- quota, budget, domain
    Case("quota of devices", qwen(TWO_H100), h100(1, quotas=(QuotaView("gpus", {"requests.nvidia.com/gpu": 1}),)), K.QUOTA,
         ("ResourceQuota gpus allows 1 x nvidia.com/gpu",), "raise requests.nvidia.com/gpu"),
    Case("quota that others use", qwen(TWO_H100), h100(1, quotas=(QuotaView("gpus", {"requests.nvidia.com/gpu": 8}, {"requests.nvidia.com/gpu": 7}),)), K.QUOTA),
    Case("quota of memory limits", example("smol-omni"),
         a_cluster(a_node("n"), quotas=(QuotaView("ram", {"limits.memory": 1 << 30}),)), K.QUOTA, ("limits.memory",)),
    Case("quota of pods", example("smol-omni"), a_cluster(a_node("n"), quotas=(QuotaView("few", {"pods": 2}),)), K.QUOTA, ("2 pods",)),
    Case("quota and replicas", qwen("[{name: thinker, replicas: 3}]"), h100(1, quotas=(QuotaView("g", {"requests.nvidia.com/gpu": 4}),)), K.QUOTA,
         (), "replicas of thinker to 2"),
    Case("budget of the tenant", qwen(TWO_H100), h100(1, tenant=TenantView("acme", {H100: 3}, {H100: 2})), K.TENANT_BUDGET,
         ("the stages ask for 2 nvidia-h100-80gb; tenant acme has 1 left of 3 (2 are in use by its other pipelines)",), "acceleratorBudget"),
    Case("a domain that must hold both ends", qwen(TWO_H100),
         a_cluster(a_node("a", H100, 1, labels={"zone": "a"}), a_node("b", H100, 1, labels={"zone": "b"}), domain_label="zone", domain_required=True),
         K.DOMAIN, ("exchange hidden rows",)),
    Case("a domain that should hold both ends", qwen(TWO_H100),
         a_cluster(a_node("a", H100, 1, labels={"zone": "a"}), a_node("b", H100, 1, labels={"zone": "b"}), domain_label="zone"),
         None, warns=("HotEdgeAcrossDomains",)),
    Case("a domain that can hold both ends", qwen(TWO_H100),
         a_cluster(a_node("a", H100, 1, labels={"zone": "a"}), a_node("b", H100, 2, labels={"zone": "b"}), domain_label="zone", domain_required=True)),
)  # fmt: skip
