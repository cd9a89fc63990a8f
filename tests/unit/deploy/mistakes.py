"""Pipelines with one mistake each: spec, field, value, and words of the problem and of the fix."""

from __future__ import annotations

import pytest

from tests.unit.deploy.builders import CUSTOM, HUB, QWEN, SMOL

CASES = [
    pytest.param(
        f"{HUB}\ntopology: qwen3_omni_mo\nruntimeProfile: cuda",
        "spec.topology", "qwen3_omni_mo", "unknown topology", "custom, qwen3_omni_moe, smol_omni (did you mean qwen3_omni_moe?)",
        id="unknown topology lists the known ones and the closest",
    ),
    pytest.param(
        f"{HUB}\ntopology: qwen3_omni_moe\nruntimeProfile: cude",
        "spec.runtimeProfile", "cude", "no OmniRuntimeProfile", "did you mean cuda?",
        id="unknown profile of the pipeline",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, runtimeProfile: rocm}]",
        "spec.stages[0].runtimeProfile", "rocm", "no OmniRuntimeProfile", "cpu, cuda, ib, ib-bare, ib-other, ib-reordered, mooncake-tcp, near, near-elsewhere, near-rdma, near-tcp-only, rdma, tcp-only, upstream",
        id="unknown profile of a stage",
    ),
    pytest.param(
        f"{HUB}\ntopology: qwen3_omni_moe",
        "spec.runtimeProfile", "", "no default", "name one of cpu, cuda",
        id="no profile at all",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, runtimeProfile: upstream}]",
        "spec.stages[0].runtimeProfile", "upstream", "backend vllm-omni", "native",
        id="a backend that this version does not run",
    ),
    pytest.param(
        QWEN + "stages: [{name: takler}]",
        "spec.stages[0].name", "takler", "no such stage", "did you mean talker?",
        id="unknown stage of a registered topology",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker}, {name: thinker}, {name: talker}]",
        "spec.stages[2].name", "talker", "spec.stages[0] has the same name", "own name",
        id="two stages of one name",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, engine: hibari_acoustic}]",
        "spec.stages[0].engine", "hibari_acoustic", "on qwen3_omni_talker", "custom",
        id="another engine than the topology's",
    ),
    pytest.param(
        CUSTOM + "stages: [{name: entry, engine: ar_vllm}]",
        "spec.stages[0].name", "entry", "the entry's own objects", "another name",
        id="a stage whose objects would be the entry's",
    ),
    pytest.param(CUSTOM, "spec.stages", "", "spelled out", "name and engine", id="custom without stages"),
    pytest.param(
        CUSTOM + "stages: [{name: thinker}]",
        "spec.stages[0].engine", "", "needs an engine", "ar_vllm, hibari_acoustic",
        id="custom stage without an engine",
    ),
    pytest.param(
        CUSTOM + "stages: [{name: thinker, engine: ar_vlm}]",
        "spec.stages[0].engine", "ar_vlm", "unknown engine", "did you mean ar_vllm?",
        id="custom stage with an unknown engine",
    ),
    pytest.param(
        QWEN + "edges: [{from: thinker, to: talker}, {from: talker, to: code2wave}]",
        "spec.edges[1].to", "code2wave", "no stage has this name", "did you mean code2wav?",
        id="edge to an unknown stage",
    ),
    pytest.param(
        QWEN + "edges: [{from: encoder, to: talker}]",
        "spec.edges[0].from", "encoder", "no stage has this name", "code2wav, talker, thinker",
        id="edge from an unknown stage",
    ),
    pytest.param(
        QWEN + "edges: [{from: thinker, to: talker}, {from: thinker, to: talker, mode: fullPayload}]",
        "spec.edges[1]", "thinker -> talker", "same edge as spec.edges[0]", "keep one",
        id="duplicate edge",
    ),
    pytest.param(
        QWEN + "edges: [{from: talker, to: talker}]",
        "spec.edges[0].to", "talker", "to itself", "two different stages",
        id="self edge",
    ),
    pytest.param(
        QWEN + "edges: [{from: thinker, to: code2wav}]",
        "spec.edges[0]", "thinker -> code2wav", "no such edge", "thinker -> talker, talker -> code2wav",
        id="an edge that the topology does not have",
    ),
    pytest.param(
        QWEN + "edges: [{from: code2wav, to: thinker}]",
        "spec.edges[0]", "thinker -> talker -> code2wav -> thinker", "cycle", "remove one",
        id="cycle through the topology's own edges",
    ),
    pytest.param(
        CUSTOM + """
stages: [{name: a, engine: ar_vllm}, {name: b, engine: hibari_acoustic}]
edges: [{from: a, to: b}, {from: b, to: a}]""",
        "spec.edges[1]", "a -> b -> a", "cycle", "remove one",
        id="cycle of two",
    ),
    pytest.param(
        CUSTOM + "stages: [{name: a, engine: ar_vllm}, {name: b, engine: hibari_vocoder}]\nedges: [{from: a, to: b}]",
        "spec.edges[0]", "a -> b", "engine hibari_vocoder takes acoustic_frames", "fit",
        id="engines that cannot exchange anything",
    ),
    pytest.param(
        CUSTOM + """
stages: [{name: a, engine: ar_vllm}, {name: b, engine: hibari_acoustic}]
edges: [{from: a, to: b, payload: codec_frames}]""",
        "spec.edges[0].payload", "codec_frames", "cannot exchange it", "text_segments",
        id="payload that the engines do not know",
    ),
    pytest.param(
        CUSTOM + """
stages: [{name: a, engine: ar_vllm}, {name: b, engine: qwen3_omni_talker}]
edges: [{from: a, to: b, payload: kv_cache}]""",
        "spec.edges[0].payload", "kv_cache", "ar_vllm and qwen3_omni_talker cannot exchange it", "thinker_hidden",
        id="a KV cache, which no engine takes",
    ),
    pytest.param(
        QWEN + "edges: [{from: thinker, to: talker, payload: text_segments}]",
        "spec.edges[0].payload", "text_segments", "sends thinker_hidden", "remove",
        id="payload that the topology does not send",
    ),
    pytest.param(
        CUSTOM + """
stages: [{name: a, engine: ar_vllm}, {name: b, engine: hibari_acoustic}, {name: c, engine: hibari_vocoder}]
edges: [{from: a, to: b}]""",
        "spec.stages[2].name", "c", "no edge leads from a", "add an edge",
        id="unreachable stage",
    ),
    pytest.param(
        CUSTOM + "stages: [{name: b, engine: hibari_acoustic}]",
        "spec.stages[0].engine", "hibari_acoustic", "no stage takes the client's request", "ar_vllm",
        id="nothing takes the request",
    ),
    pytest.param(
        CUSTOM + "stages: [{name: a, engine: ar_vllm}, {name: b, engine: hibari_acoustic}]\nedges: [{from: a, to: b}]",
        "spec.stages[1].name", "b", "nothing that is sent to the client needs", "add an edge from it",
        id="dead end",
    ),
    pytest.param(
        QWEN + "edges: [{from: talker, to: code2wav, connector: {type: SharedMemory}}]",
        "spec.edges[0].connector.type", "SharedMemory", "different pods", "Auto or TCP, or give both stages the same podGroup",
        id="shared memory across pods (R62)",
    ),
    pytest.param(
        QWEN + "edges: [{from: talker, to: code2wav, connector: {type: Mooncake}}]",
        "spec.edges[0].connector.type", "Mooncake", "offers only SharedMemory, TCP", "use TCP, or",
        id="Mooncake where the profile does not list it",
    ),
    pytest.param(
        QWEN + """
stages: [{name: thinker, runtimeProfile: rdma}, {name: talker, runtimeProfile: ib}]
edges: [{from: thinker, to: talker, connector: {type: Mooncake}}]""",
        "spec.edges[0].connector.type", "Mooncake",
        "Mooncake of runtime profile 'ib' (stage talker) sends by RDMA, that of 'rdma' (thinker) by TCP",
        "use TCP, or give both profiles the same mooncake.protocol",
        id="Mooncake by RDMA at one end only",
    ),
    pytest.param(
        SMOL + """
stages:
- {name: talker, podGroup: g, runtimeProfile: tcp-only}
- {name: code2wav, podGroup: g, runtimeProfile: tcp-only}""",
        "spec.edges[from=talker,to=code2wav].connector.type", "SharedMemory", "offers only TCP", "use TCP",
        id="a connector that the profile does not offer",
    ),
    pytest.param(
        QWEN + "edges: [{from: thinker, to: talker, chunk: {frames: 4}}]",
        "spec.edges[0].chunk", "frames: 4", "not counted in frames", "remove",
        id="chunk sizes where the producer decides",
    ),
    pytest.param(
        QWEN + "edges: [{from: talker, to: code2wav, mode: fullPayload, chunk: {frames: 4}}]",
        "spec.edges[0].chunk", "frames: 4", "one message", "remove",
        id="chunk sizes without chunks",
    ),
    pytest.param(
        QWEN + "edges: [{from: talker, to: code2wav, chunk: {initialFrames: 50}}]",
        "spec.edges[0].chunk.initialFrames", "50", "larger than the following", "4 to 25",
        id="first chunk larger than the others",
    ),
    pytest.param(
        SMOL + "edges: [{from: talker, to: code2wav, chunk: {leftContextFrames: 8}}]",
        "spec.edges[0].chunk.leftContextFrames", "8", "needs no left context", "use 0",
        id="left context for a decoder with state",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, replicas: 1, scaling: {minReplicas: 1, maxReplicas: 2}}]",
        "spec.stages[0].replicas", "1", "together with scaling", "fixed count, or scaling",
        id="replicas together with scaling",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, scaling: {minReplicas: 3, maxReplicas: 2}}]",
        "spec.stages[0].scaling.minReplicas", "3", "more than maxReplicas 2", "0 to 2",
        id="min above max",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, podGroup: g, replicas: 1}, {name: code2wav, podGroup: g, replicas: 2}]",
        "spec.stages[1].replicas", "2", "stage talker shares its pods and asks for 1", "podGroup",
        id="one pod, two counts",
    ),
    pytest.param(
        QWEN + """
stages:
- {name: talker, podGroup: g, replicas: 1}
- {name: code2wav, podGroup: g, scaling: {minReplicas: 1, maxReplicas: 2}}""",
        "spec.stages[1].scaling", "1 to 2", "asks for 1", "podGroup",
        id="one pod, a count and a range",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, podGroup: g}, {name: code2wav, podGroup: g, runtimeProfile: cpu}]",
        "spec.stages[1].runtimeProfile", "cpu", "talker shares its pods, and has 'cuda'", "podGroup",
        id="one pod, two profiles",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, podGroup: g}, {name: code2wav, podGroup: g, accelerator: {class: nvidia-l4}}]",
        "spec.stages[1].accelerator.class", "nvidia-l4", "has 'nvidia-h100-80gb'", "podGroup",
        id="one pod, two device classes",
    ),
    pytest.param(
        QWEN + """
stages:
- {name: talker, podGroup: g, scheduling: {nodeSelector: {zone: a}}}
- {name: code2wav, podGroup: g, scheduling: {nodeSelector: {zone: b}}}""",
        "spec.stages[1].scheduling.nodeSelector", "gpu=h100,pool=serving,zone=b", "zone=a", "podGroup",
        id="one pod, two node selectors",
    ),
    pytest.param(
        QWEN + """
stages:
- {name: talker, podGroup: g}
- {name: code2wav, podGroup: g, scheduling: {tolerations: [{operator: Exists}]}}""",
        "spec.stages[1].scheduling.tolerations", "{'key': 'nvidia.com/gpu', 'operator': 'Exists'}; {'operator': 'Exists'}", "talker shares its pods", "podGroup",
        id="one pod, two sets of tolerations",
    ),
    pytest.param(
        QWEN + """
stages:
- {name: talker, podGroup: g, accelerator: {class: nvidia-h100-80gb, memoryFraction: "0.6"}}
- {name: code2wav, podGroup: g, accelerator: {class: nvidia-h100-80gb, memoryFraction: "0.401"}}""",
        "spec.stages[1].accelerator.memoryFraction", "0.401", "talker 0.6 + code2wav 0.401 = 1.001, more than 1", "lower",
        id="memory of one device given twice (T71)",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, accelerator: {class: nvidia-h200}}]",
        "spec.stages[0].accelerator.class", "nvidia-h200", "no such device class", "nvidia-h100-80gb, nvidia-l4",
        id="device class that the profile does not have",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, accelerator: {class: nvidia-l4, count: 2}, parallelism: {tensor: 4}}]",
        "spec.stages[0].accelerator.count", "2", "needs 4 devices", "use 4",
        id="fewer devices than the parallelism needs",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, accelerator: {class: nvidia-l4, count: 3}, parallelism: {tensor: 2}}]",
        "spec.stages[0].accelerator.count", "3", "not divisible", "use 2",
        id="count not divisible by the parallelism",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, accelerator: {class: nvidia-l4, count: 4}, parallelism: {tensor: 2}}]",
        "spec.stages[0].accelerator.count", "4", "2 would idle", "parallelism.tensor to 4",
        id="devices that nobody would use",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, accelerator: {class: nvidia-l4, count: 2}}]",
        "spec.stages[0].accelerator.count", "2", "runs on one device", "replicas",
        id="an engine that cannot spread",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, parallelism: {tensor: 2}}]",
        "spec.stages[0].parallelism.tensor", "2", "runs on one device", "replicas",
        id="an engine that cannot spread, asked for by its parallelism",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, parallelism: {pipeline: 2}}]",
        "spec.stages[0].parallelism.pipeline", "2", "the next stage needs hidden states", "use 1",
        id="pipeline ranks where hidden states are read",
    ),
    pytest.param(
        SMOL + "stages: [{name: thinker, engineArgs: [{name: enable_sleep_mode, value: 'true'}]}]",
        "spec.stages[0].engineArgs[name=enable_sleep_mode]", "true", "no device memory", "remove it",
        id="sleep mode on the CPU",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: kv_cache_dtype, value: banana}]}]",
        "spec.stages[0].engineArgs[0].value", "banana", "kv_cache_dtype is of type str", "fp8_e4m3",
        id="a type of the cache that vLLM does not know",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: quantization, value: banana}]}]",
        "spec.stages[0].engineArgs[0].value", "banana", "quantization is of type str", "compressed-tensors",
        id="a quantization that vLLM does not know",
    ),
    pytest.param(
        QWEN + "stages: [{name: talker, scheduling: {nodeSelector: {gpu: l4}}}]",
        "spec.stages[0].scheduling.nodeSelector[gpu]", "l4", "this label is 'h100'", "device class",
        id="node selector against the device class",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: max_modle_len, value: '8'}]}]",
        "spec.stages[0].engineArgs[0].name", "max_modle_len", "no such arg", "did you mean max_model_len?",
        id="unknown engine arg",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: data_parallel_size, value: '2'}]}]",
        "spec.stages[0].engineArgs[0].name", "data_parallel_size", "not an engine arg here", "replicas",
        id="refused engine arg",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: max_model_len, value: 4k}]}]",
        "spec.stages[0].engineArgs[0].value", "4k", "of type int", "whole number",
        id="engine arg of another type: int",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: cpu_offload_gb, value: nan}]}]",
        "spec.stages[0].engineArgs[0].value", "nan", "of type float", "decimal",
        id="engine arg of another type: float",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: async_scheduling, value: 'yes'}]}]",
        "spec.stages[0].engineArgs[0].value", "yes", "of type bool", "true or false",
        id="engine arg of another type: bool",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: dtype, value: fp8}]}]",
        "spec.stages[0].engineArgs[0].value", "fp8", "of type str", "auto, float32",
        id="engine arg outside its choices",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: seed, value: '1'}, {name: seed, value: '2'}]}]",
        "spec.stages[0].engineArgs[1].name", "seed", "engineArgs[0] has the same name", "keep one",
        id="engine arg given twice",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: enable_prefix_caching, value: 'true'}]}]",
        "spec.stages[0].engineArgs[0].value", "true", "computes no hidden rows", "false",
        id="prefix cache on a tapped stage",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, engineArgs: [{name: tap, value: hooks}, {name: enforce_eager, value: 'false'}]}]",
        "spec.stages[0].engineArgs[1].value", "false", "skip the hook", "set tap to aux",
        id="graphs under hooks",
    ),
    pytest.param(
        QWEN + "stages: [{name: thinker, resources: {sharedMemory: 64Mi}}]",
        "spec.stages[0].resources.sharedMemory", "64Mi", "one chunk of edge thinker -> talker takes up to", "at least",
        id="arena smaller than a chunk",
    ),
    pytest.param(
        QWEN + "stages: [{name: code2wav, resources: {memory: 1Gi, sharedMemory: 1Gi}}]",
        "spec.stages[0].resources.sharedMemory", "1Gi", "counts against the stage's memory", "raise",
        id="arena that eats all of the memory",
    ),
    pytest.param(
        QWEN + "stages: [{name: code2wav, resources: {cpu: '0'}}]",
        "spec.stages[0].resources.cpu", "0", "needs some", "more than 0",
        id="no cpu",
    ),
    pytest.param(
        SMOL.replace("runtimeProfile: cpu", "runtimeProfile: cuda"),
        "spec.model.uri", "packaged://smol-omni", "CPU image only", "hf://",
        id="packaged model on a GPU image",
    ),
    pytest.param(
        SMOL.replace("}", ", revision: main}"),
        "spec.model.revision", "main", "has no revisions", "hf://",
        id="revision of a packaged model",
    ),
    pytest.param(
        QWEN.replace("hf://Qwen/", "file:///a/../"),
        "spec.model.uri", "file:///a/../Qwen3-Omni-30B-A3B-Instruct", "climbs out", "'..'",
        id="path that climbs (R58)",
    ),
    pytest.param(
        QWEN + "budget: {accelerators: 2}\nstages: [{name: thinker, accelerator: {class: nvidia-l4, count: 2}}]",
        "spec.budget.accelerators", "2", "thinker 1 x 2 + talker 1 x 1 + code2wav 1 x 1 = 4", "4 or more",
        id="budget below the least that runs",
    ),
    pytest.param(
        QWEN + "entry: {resources: {sharedMemory: 1Gi}}",
        "spec.entry.resources.sharedMemory", "1Gi", "no tensor passes the entry", "remove",
        id="an arena for the entry",
    ),
]  # fmt: skip
