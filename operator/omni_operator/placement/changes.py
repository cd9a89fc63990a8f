"""Single changes to a pipeline or a cluster that may help, the smallest first. Each is a new question to ask. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from omni_operator.placement.edits import said, said_spread, with_argument, with_class, with_tensor
from omni_operator.placement.memory import max_model_len
from omni_operator.placement.question import Question, replace_stage
from omni_operator.placement.types import ConstraintKind, Infeasible, StageMemory
from omni_operator.resources.stage_pod import rdma_of
from omni_runtime.deploy.plan import StagePlan
from omni_runtime.deploy.quantity import parse_quantity
from omni_runtime.topology.engines import ENGINES
from omni_runtime.topology.types import EngineKind

MIN_LENGTH = 1024
MAX_TENSOR = 16
QUARTER_GIB = 1 << 28


@dataclass(frozen=True, slots=True)
class Change:
    """text: what a person does, without a full stop; path and value: the field, where it is one of the pipeline."""

    text: str
    question: Question
    path: str = ""
    value: str = ""
    stage: str = ""


Maker = Callable[[Question, StagePlan, StageMemory], Change | None]


# ------------------------------------------------------------------------------------------------ memory
def raise_fraction(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """As much of the device as the stage needs, if its neighbours leave it."""
    others = sum(s.device.memory_fraction for s in _neighbours(question, stage))
    fraction = math.ceil(100 * memory.need / memory.capacity) / 100 if memory.capacity else 2.0
    if stage.device.resource_name is None or fraction + others > 1 or fraction <= stage.device.memory_fraction:
        return None
    device = msgspec.structs.replace(stage.device, memory_fraction=fraction)
    return _changed(question, stage, "accelerator.memoryFraction", f"{fraction:g}", device=device)


def lower_concurrency(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """Fewer slots, fewer rows in a batch."""

    def with_requests(count: int) -> StagePlan:
        return msgspec.structs.replace(stage, max_concurrency=count)

    best = _largest(1, stage.max_concurrency - 1, lambda n: _fits(question, with_requests(n)))
    if best is None:
        return None
    return _changed(question, stage, "maxConcurrency", str(best), max_concurrency=best)


def lower_length(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """Shorter requests: the KV cache has to hold one of full length."""
    if stage.engine is not EngineKind.AR_VLLM:
        return None
    now = max_model_len(stage, question.part(stage))

    def with_length(blocks: int) -> StagePlan:
        return with_argument(stage, "max_model_len", str(blocks * MIN_LENGTH))

    best = _largest(1, (now - 1) // MIN_LENGTH, lambda n: _fits(question, with_length(n)))
    return None if best is None else _argument(question, stage, "max_model_len", str(best * MIN_LENGTH))


def lower_cache(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """A cache of a stated size: what the rest leaves of the device."""
    stated = dict(stage.engine_args).get("kv_cache_memory_bytes")
    if stated is None or stage.engine is not EngineKind.AR_VLLM:
        return None
    left = (int(stated) - memory.missing) // QUARTER_GIB * QUARTER_GIB
    change = _argument(question, stage, "kv_cache_memory_bytes", str(left)) if left > 0 else None
    return change and _if_fits(question, change, stage)


def smaller_cache_type(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    device = question.device(stage)
    if stage.engine is not EngineKind.AR_VLLM or device is None or not device.supports("fp8"):
        return None
    if "kv_cache_dtype" in dict(stage.engine_args):
        return None
    return _if_fits(question, _argument(question, stage, "kv_cache_dtype", "fp8"), stage)


def raise_tensor(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """Over twice, four times, ... as many devices."""
    part = question.part(stage)
    if not ENGINES[stage.engine].parallel or part is None or stage.device.resource_name is None:
        return None
    tensor = stage.tensor_parallel * 2
    while tensor <= MAX_TENSOR:
        split = not part.heads or (part.heads % tensor == 0 and (not part.kv_heads or part.kv_heads % tensor == 0
                                                                  or tensor % part.kv_heads == 0))  # fmt: skip
        changed = with_tensor(stage, tensor)
        if split and _fits(question, changed):
            return _spread_over(question, changed)
        tensor *= 2
    return None


def whole_devices(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """All that the neighbours leave of each device, and as many devices as it then takes."""
    free = 1 - sum(s.device.memory_fraction for s in _neighbours(question, stage))
    fraction = math.floor(100 * min(free, 0.95)) / 100
    if stage.device.resource_name is None or fraction <= stage.device.memory_fraction:
        return None
    device = msgspec.structs.replace(stage.device, memory_fraction=fraction)
    first = _changed(question, stage, "accelerator.memoryFraction", f"{fraction:g}", device=device)
    wide = first.question.plan.stage(stage.name)
    second = raise_tensor(first.question, wide, memory) or other_class(first.question, wide, memory)
    return second and Change(f"{first.text}; {second.text}", second.question, stage=stage.name)


def other_class(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """The smallest class of the same profile on which all stages of the pod fit."""
    if stage.device.resource_name is None:
        return None
    return next(iter(class_changes(question, stage)), None)


def raise_ram(question: Question, stage: StagePlan, memory: StageMemory) -> Change | None:
    """A stage on the CPU: more memory for its container."""
    if stage.device.resource_name is not None:
        return None
    arena = memory.capacity - _ram(stage)
    quarters = math.ceil((memory.need - arena) / QUARTER_GIB)
    text = f"{quarters // 4}Gi" if quarters % 4 == 0 else f"{quarters * 256}Mi"
    return _changed(question, stage, "resources.memory", text, memory=text)


MEMORY_MAKERS: tuple[Maker, ...] = (
    raise_fraction, lower_concurrency, lower_length, lower_cache, smaller_cache_type, raise_tensor, other_class, raise_ram,
)  # fmt: skip


def memory_changes(question: Question, verdict: Infeasible) -> Iterator[Change]:
    """For all stages that are short at once: one kind of change for as many of them as it helps, others for the rest."""
    offered: set[str] = set()
    for lead in MEMORY_MAKERS:
        change = _cure(question, verdict, (lead, *(m for m in MEMORY_MAKERS if m is not lead)), lead)
        if change is not None and change.text not in offered:
            offered.add(change.text)
            yield change
    last = None if offered else _cure(question, verdict, (*MEMORY_MAKERS, whole_devices), None)
    if last is not None:
        yield last


def _cure(question: Question, verdict: Infeasible, makers: tuple[Maker, ...], lead: Maker | None) -> Change | None:
    texts: list[str] = []
    first: Change | None = None
    led = lead is None
    for name in verdict.constraint.stages:
        stage = question.plan.stage(name)
        memory = question.memory(stage)
        if memory is None or not memory.missing:
            continue  # a change for another stage of the pod helped this one too
        for maker in makers:
            change = maker(question, stage, memory)
            if change is not None:
                question, led = change.question, led or maker is lead
                texts.append(change.text)
                first = first or change
                break
        else:
            return None
    if first is None or not led:
        return None
    single = len(texts) == 1
    return Change("; ".join(texts), question, first.path if single else "", first.value if single else "", first.stage)


def class_changes(question: Question, stage: StagePlan) -> Iterator[Change]:
    """Other classes of the profile for the whole pod of the stage, smallest first, on which its stages fit."""
    now = question.device(stage)
    for device in sorted(question.catalogue.others(stage.profile), key=lambda d: (d.usable, d.name)):
        if device.resource_name is None or device.name == stage.device.device_class:
            continue
        plan = question.plan
        for member in plan.pod_groups()[stage.pod_group]:
            plan = replace_stage(plan, with_class(member, now, device))
        changed = question.with_plan(plan)
        if all(_fits(changed, s) for s in plan.pod_groups()[stage.pod_group]):
            path = f"{question.path(stage.name)}.accelerator.class"
            members = plan.pod_groups()[stage.pod_group]
            text = "; ".join(said(question, member, "accelerator.class", device.name) for member in members)
            yield Change(text, changed, path, device.name, stage.name)


# ------------------------------------------------------------------------------------------------ other constraints
def unshare(question: Question, verdict: Infeasible) -> Iterator[Change]:
    """Stages that share a device and ask for more than it has: what each needs, else pods of their own."""
    plan, texts = question.plan, []
    for name in verdict.constraint.stages:
        stage = plan.stage(name)
        memory = question.memory(stage)
        if memory is not None and memory.known and memory.capacity:
            fraction = max(0.01, math.ceil(100 * memory.need / memory.capacity) / 100)
            if fraction < stage.device.memory_fraction:
                device = msgspec.structs.replace(stage.device, memory_fraction=fraction)
                plan = replace_stage(plan, msgspec.structs.replace(stage, device=device))
                texts.append(said(question, stage, "accelerator.memoryFraction", f"{fraction:g}"))
    if texts:
        yield Change("; ".join(texts), question.with_plan(plan))
    last = question.plan.stage(verdict.constraint.stages[-1])
    if last.pod_group != last.name:
        alone = replace_stage(question.plan, msgspec.structs.replace(last, pod_group=last.name))
        edges = tuple(
            msgspec.structs.replace(e, connector="TCP") if last.name in (e.source, e.to) else e for e in alone.edges
        )
        path = f"{question.path(last.name)}.podGroup"
        text = f"remove podGroup of {last.name}, so that it has pods and devices of its own"
        yield Change(text, question.with_plan(msgspec.structs.replace(alone, edges=edges)), path, "", last.name)


def fewer_replicas(question: Question, group: str, fits: Callable[[Question], bool]) -> Change | None:
    """The largest count below the present one with which the rest of the question is answered."""
    plan = question.plan
    stages = plan.pod_groups().get(group)
    if stages is None or group not in plan.replicas:
        return None
    now = plan.replicas[group].initial

    def with_count(count: int) -> Question:
        bounds = dict(plan.replicas)
        for stage in stages:
            old = bounds[stage.name]
            bounds[stage.name] = (
                msgspec.structs.replace(old, requested=count)
                if old.requested is not None
                else msgspec.structs.replace(old, minimum=count)
            )
        return question.with_plan(msgspec.structs.replace(plan, replicas=bounds))

    best = _largest(1, now - 1, lambda n: fits(with_count(n)))
    if best is None:
        return None
    fixed = plan.replicas[group].requested is not None
    field = "replicas" if fixed else "scaling.minReplicas"
    path = f"{question.path(group)}.{field}"
    return Change(f"set {field} of {group} to {best} (now {now})", with_count(best), path, str(best), group)


def lower_tensor(question: Question, group: str) -> Iterator[Change]:
    """Fewer devices per replica, where the stage still fits on each."""
    for stage in question.plan.pod_groups().get(group, ()):
        tensor = stage.tensor_parallel // 2
        while tensor >= 1 and stage.tensor_parallel > 1:
            changed = with_tensor(stage, tensor)
            if _fits(question, changed):
                yield _spread_over(question, changed)
            tensor //= 2


def less_cpu(question: Question, group: str, spare: int) -> Iterator[Change]:
    """spare: millicores that the pod has to give up. Taken from the stage of it that asks for most."""
    stages = question.plan.pod_groups().get(group, ())
    if not stages:
        return
    biggest = max(stages, key=_millicores)
    left = _millicores(biggest) - spare
    if left >= 100:
        text = f"{left // 1000}" if left % 1000 == 0 else f"{left}m"
        yield _changed(question, biggest, "resources.cpu", text, cpu=text)


def without_rdma(question: Question, group: str, resource: str) -> Iterator[Change]:
    """Edges by TCP that need an RDMA device which nodes do not have: those of the group, else all."""
    plan = question.plan
    groups = plan.pod_groups()
    asking = {name for name, stages in groups.items() if (r := rdma_of(plan, stages)) and r.resource_name == resource}
    if group not in asking:
        return
    group_of = {s.name: s.pod_group for s in plan.stages}
    ends = {e.name: {group_of[e.source], group_of[e.to]} for e in plan.edges if e.connector == "Mooncake"}
    own = [name for name, of in ends.items() if group in of]
    every = [name for name, of in ends.items() if of & asking]
    for names in (own, every) if len(every) > len(own) else (own,):
        edges = tuple(msgspec.structs.replace(e, connector="TCP") if e.name in names else e for e in plan.edges)
        text = "; ".join(f"set connector.type of the edge {name} to TCP" for name in names)
        yield Change(text, question.with_plan(msgspec.structs.replace(plan, edges=edges)))


def raise_quota(
    question: Question, needed: Mapping[tuple[str, str], int], human: Mapping[tuple[str, str], str]
) -> Change:
    """All quotas of the namespace that are in the way."""
    quotas = tuple(
        replace(q, hard={key: max(hard, needed.get((q.name, key), 0)) for key, hard in q.hard.items()})
        for q in question.cluster.quotas
    )
    parts = "; ".join(f"raise {key} of ResourceQuota {name} to {human[name, key]}" for name, key in needed)
    return Change(parts, question.with_cluster(replace(question.cluster, quotas=quotas)))


def raise_budget(question: Question, needed: Mapping[str, int]) -> Change:
    tenant = question.cluster.tenant
    assert tenant is not None
    raised = replace(tenant, budget={**tenant.budget, **needed})
    parts = "; ".join(
        f"raise acceleratorBudget of {name} for OmniTenant {tenant.name} to {n}" for name, n in needed.items()
    )
    return Change(parts, question.with_cluster(replace(question.cluster, tenant=raised)))


def ignore_domain(question: Question) -> Change:
    cluster = replace(question.cluster, domain_required=False)
    return Change("allow hot edges to cross topology domains", question.with_cluster(cluster))


# ------------------------------------------------------------------------------------------------ helpers
def _neighbours(question: Question, stage: StagePlan) -> list[StagePlan]:
    """Stages that share its devices."""
    members = question.plan.pod_groups()[stage.pod_group]
    return [s for s in members if s.name != stage.name and s.device.resource_name]


def _fits(question: Question, stage: StagePlan) -> bool:
    memory = question.memory(stage)
    return memory is not None and memory.missing == 0


def _if_fits(question: Question, change: Change, stage: StagePlan) -> Change | None:
    return change if _fits(change.question, change.question.plan.stage(stage.name)) else None


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The largest n in low..high that holds; holding is monotone: what holds for n holds below."""
    if high < low or not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _changed(question: Question, stage: StagePlan, field: str, value: str, **fields: object) -> Change:
    return _replaced(question, msgspec.structs.replace(stage, **fields), field, value)


def _replaced(question: Question, stage: StagePlan, field: str, value: str) -> Change:
    plan, text = replace_stage(question.plan, stage), said(question, stage, field, value)
    return Change(text, question.with_plan(plan), f"{question.path(stage.name)}.{field}", value, stage.name)


def _spread_over(question: Question, stage: StagePlan) -> Change:
    at, plan = question.path(stage.name), replace_stage(question.plan, stage)
    text = said_spread(question, stage)
    return Change(text, question.with_plan(plan), f"{at}.parallelism.tensor", str(stage.tensor_parallel), stage.name)


def _argument(question: Question, stage: StagePlan, name: str, value: str) -> Change:
    return _replaced(question, with_argument(stage, name, value), f"engineArgs[name={name}]", value)


def _ram(stage: StagePlan) -> int:
    return int(parse_quantity(stage.memory))


def _millicores(stage: StagePlan) -> int:
    return int(parse_quantity(stage.cpu) * 1000)


NODE_KINDS = frozenset(
    {ConstraintKind.NO_NODE, ConstraintKind.NODE_TOO_SMALL, ConstraintKind.CAPACITY, ConstraintKind.FRAGMENTATION}
)
