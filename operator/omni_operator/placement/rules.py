"""What a stage asks of its devices that they cannot do, whatever is free. Each rule is one function; pure.

Rules that need no knowledge of devices and models are the resolver's and the webhook's, not these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor
from omni_operator.placement.edits import with_tensor
from omni_operator.placement.memory import least_cache, max_model_len
from omni_operator.placement.modelfacts import GIB
from omni_operator.placement.question import Question
from omni_operator.placement.types import PlacementWarning
from omni_operator.resources.stage_pod import engine_port
from omni_runtime.deploy.overlay import PIPELINE
from omni_runtime.deploy.plan import (
    ENTRY_CONTROL_PORT,
    SIDECAR_DATA_PORT,
    SIDECAR_HTTP_PORT,
    StagePlan,
)
from omni_runtime.deploy.quantity import parse_quantity
from omni_runtime.errors import FieldError
from omni_runtime.topology.types import EngineKind

Finding = FieldError | PlacementWarning
StageRule = Callable[[Question, StagePlan], Iterator[Finding]]
# Names of device plugins that do not have "rdma" in them.
_RDMA_RESOURCES = frozenset({"nvidia.com/mlnxnics", "vpc.amazonaws.com/efa"})


def device_class_exists(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """A class that neither a profile nor the table describes has no memory to compare with."""
    if question.device(stage) is None:
        yield FieldError(
            f"{question.path(stage.name)}.accelerator.class",
            stage.device.device_class,
            f"neither runtime profile {stage.profile} nor the table of devices has this class",
            "use a class of the profile, or add it to the profile's deviceClasses with its memory",
        )


def dtype_is_supported(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """Weights in a type that the device does not compute in (fp8 on Hopper, Ada and MI300, not on A100 or 910B)."""
    device, part = question.device(stage), question.part(stage)
    arguments = dict(stage.engine_args)
    dtype = arguments.get("dtype", "auto")
    loaded = part.dtype if dtype == "auto" and part else dtype
    if device is None or loaded == "auto" or device.supports(loaded):
        return
    yield FieldError(
        _argument_path(question, stage, "dtype"),
        loaded,
        f"{device.name} does not compute in {loaded}",
        f"use one of {', '.join(sorted(device.dtypes - {'int8', 'fp8', 'fp4'}))}, or another device class",
    )


def kv_cache_dtype_is_supported(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """An fp8 KV cache is read by attention kernels, which exist only where the device has fp8."""
    device, named = question.device(stage), dict(stage.engine_args).get("kv_cache_dtype", "auto")
    if device is None or named == "auto" or device.supports(named):
        return
    problem = f"{device.name} has no {named}"
    yield FieldError(
        _argument_path(question, stage, "kv_cache_dtype"), named, problem, "use auto, or another device class"
    )


def quantization_is_supported(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """fp8 weights: computed where the device has fp8; unpacked on the fly on older NVIDIA; nowhere else."""
    device, named = question.device(stage), dict(stage.engine_args).get("quantization", "")
    if device is None or not named.startswith(("fp8", "nvfp4", "mxfp4")) or device.supports(named):
        return
    path = _argument_path(question, stage, "quantization")
    if device.vendor is AcceleratorVendor.NVIDIA:
        message = (
            f"{device.name} does not compute in {named}: weights are unpacked on the fly, which saves memory, not time"
        )
        yield PlacementWarning("QuantizationUnpacked", message, path)
    else:
        yield FieldError(path, named, f"{device.name} has no {named}", "remove it, or use another device class")


def tensor_divides_heads(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """Attention heads are dealt out whole. Key-value heads that are fewer than the ranks are copied, not cut."""
    part, tensor = question.part(stage), stage.tensor_parallel
    if part is None or tensor == 1 or not part.heads:
        return
    derived = question.plan.origins.get(f"stages.{stage.name}.parallelism.tensor") == f"{PIPELINE} accelerator.count"
    path = f"{question.path(stage.name)}.{'accelerator.count' if derived else 'parallelism.tensor'}"
    if part.heads % tensor or not _kv_fits(part.kv_heads, tensor):
        dividing = [n for n in range(1, part.heads + 1) if part.heads % n == 0 and _kv_fits(part.kv_heads, n)]
        fitting = [n for n in dividing if _fits(question, with_tensor(stage, n))]
        near = sorted(sorted(fitting or dividing, key=lambda n: abs(n - tensor))[:3])
        problem = f"the model has {part.heads} attention heads and {part.kv_heads} key-value heads"
        yield FieldError(path, str(tensor), problem, f"use one of {', '.join(map(str, near))}")
    elif part.kv_heads < tensor:
        message = f"{part.kv_heads} key-value heads over {tensor} ranks: each is kept {tensor // part.kv_heads} times"
        yield PlacementWarning("KeyValueHeadsCopied", message, path)


def pipeline_has_layers(question: Question, stage: StagePlan) -> Iterator[Finding]:
    part = question.part(stage)
    if part is not None and part.attention_layers and stage.pipeline_parallel > part.attention_layers:
        yield FieldError(
            f"{question.path(stage.name)}.parallelism.pipeline",
            str(stage.pipeline_parallel),
            f"the model has {part.attention_layers} layers",
            f"use at most {part.attention_layers}",
        )


def length_is_known_to_the_model(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """Positions that the model was not made for: vLLM refuses to start with them."""
    part, stated = question.part(stage), dict(stage.engine_args).get("max_model_len")
    if part is None or not stated or not part.max_positions or stage.engine is not EngineKind.AR_VLLM:
        return
    if int(stated) > part.max_positions and "hf_overrides" not in dict(stage.engine_args):
        problem = f"the model has {part.max_positions} positions"
        yield FieldError(
            _argument_path(question, stage, "max_model_len"), stated, problem, f"use at most {part.max_positions}"
        )


def step_holds_every_request(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """vLLM refuses to start when one step cannot take a token of each request, or a whole prompt that may not be cut."""
    arguments = dict(stage.engine_args)
    stated = arguments.get("max_num_batched_tokens")
    if stated is None or stage.engine is not EngineKind.AR_VLLM:
        return
    length = max_model_len(stage, question.part(stage))
    whole = length if arguments.get("enable_chunked_prefill") == "false" else 0
    least = max(stage.max_concurrency, whole)
    if int(stated) < least:
        what = "a whole prompt, since prompts are not cut" if whole == least else "one token of each request"
        problem = f"a step has to hold {what}: {least} tokens"
        path = _argument_path(question, stage, "max_num_batched_tokens")
        yield FieldError(path, stated, problem, f"use at least {least}, or remove it")


def cache_holds_a_request(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """vLLM refuses to start with a KV cache that is too small for one request of full length."""
    device, part = question.device(stage), question.part(stage)
    found = least_cache(stage, part, device) if device is not None and part is not None else None
    if found is not None and found[0] < found[1]:
        problem = f"one request of {max_model_len(stage, part)} positions takes {found[1]}"
        path = _argument_path(question, stage, "kv_cache_memory_bytes")
        yield FieldError(path, str(found[0]), problem, f"use at least {found[1]}, or a smaller max_model_len")


def offloaded_weights_have_room(question: Question, stage: StagePlan) -> Iterator[Finding]:
    """Weights that stay in host memory are in the memory of the container, once for each device."""
    stated = float(dict(stage.engine_args).get("cpu_offload_gb", 0))
    room = int(parse_quantity(stage.memory)) / GIB
    if stated * stage.device.count > room:
        problem = f"{stated * stage.device.count:g} GiB for {stage.device.count} devices, and resources.memory is {stage.memory}"
        fix = f"use at most {int(room / stage.device.count)}, or raise resources.memory"
        yield FieldError(_argument_path(question, stage, "cpu_offload_gb"), f"{stated:g}", problem, fix)


def ports_do_not_meet(question: Question) -> Iterator[Finding]:
    """Ports of one pod: the entry's API beside its control channel; engines beside the connector."""
    entry = question.plan.entry
    if entry.port == ENTRY_CONTROL_PORT:
        problem = "the control channel of the entry listens there"
        yield FieldError("spec.entry.port", str(entry.port), problem, "use 8000, or any other port")
    for leader, stages in question.plan.pod_groups().items():
        taken = {SIDECAR_DATA_PORT, SIDECAR_HTTP_PORT}
        for index, stage in enumerate(stages):
            port = engine_port(index)
            if port in taken:
                problem = f"with {len(stages)} stages in the pods of {leader}, port {port} is taken twice"
                yield FieldError(f"{question.path(stage.name)}.podGroup", leader, problem, "take some stages apart")
            taken.add(port)


def mooncake_has_rdma(question: Question) -> Iterator[Finding]:
    """Over TCP Mooncake is hardly faster than the connector TCP, and not sealed. By RDMA it needs a device: one that its
    profile names is asked for like any other resource; where none is named, nodes have to give one in another way."""
    stages = {stage.name: stage for stage in question.plan.stages}
    for edge in question.plan.edges:
        source = stages[edge.source]
        if edge.connector != "Mooncake" or source.pod_group == stages[edge.to].pod_group:
            continue
        path = f"spec.edges[{edge.name}].connector.type"
        if source.rdma is None:
            message = (
                f"Mooncake of runtime profile {source.profile} sends by TCP, neither sealed nor faster than the connector "
                "TCP; use TCP, or a profile with mooncake.protocol RDMA"
            )
            yield PlacementWarning("MooncakeOverTcp", message, path)
            continue
        for stage in (source, stages[edge.to]):
            if stage.rdma is not None and stage.rdma.resource_name is None and not _offers_rdma(question):
                message = (
                    f"no node offers an RDMA device, and runtime profile {stage.profile} names none to ask for "
                    "(mooncake.resource): the connector will use TCP"
                )
                yield PlacementWarning("NoRdmaDevice", message, path)
                break


def _offers_rdma(question: Question) -> bool:
    """Whether some node does; nobody is warned where the nodes are not known."""
    return question.fleet is None or any(
        amount and ("rdma" in name or name in _RDMA_RESOURCES)
        for kind in question.fleet
        for name, amount in kind.node.allocatable.items()
    )


STAGE_RULES: tuple[StageRule, ...] = (
    device_class_exists,
    dtype_is_supported,
    kv_cache_dtype_is_supported,
    quantization_is_supported,
    tensor_divides_heads,
    pipeline_has_layers,
    length_is_known_to_the_model,
    step_holds_every_request,
    cache_holds_a_request,
    offloaded_weights_have_room,
)


def check_rules(question: Question) -> tuple[tuple[FieldError, ...], tuple[PlacementWarning, ...]]:
    """(violations, warnings) of all rules, in the order of the stages."""
    found: list[Finding] = []
    for stage in question.plan.stages:
        for rule in STAGE_RULES:
            found.extend(rule(question, stage))
    found.extend(ports_do_not_meet(question))
    found.extend(mooncake_has_rdma(question))
    errors = tuple(f for f in found if isinstance(f, FieldError))
    return errors, tuple(f for f in found if isinstance(f, PlacementWarning))


def _kv_fits(heads: int, tensor: int) -> bool:
    return not heads or heads % tensor == 0 or tensor % heads == 0


def _fits(question: Question, stage: StagePlan) -> bool:
    memory = question.memory(stage)
    return memory is None or not memory.missing


def _argument_path(question: Question, stage: StagePlan, name: str) -> str:
    return f"{question.path(stage.name)}.engineArgs[name={name}]"
