"""May this replica serve this pipeline? Pure; the reason of a refusal reaches the replica's log and its readiness."""

from __future__ import annotations

from omni_runtime.deploy.plan import CONTRACT_VERSION, ResolvedPlan
from omni_runtime.protocol.control import Hello

MAX_CAPACITY = 65_536


def refusal_of(hello: Hello, plan: ResolvedPlan) -> str | None:
    """None: welcome. Otherwise why not, in words that say what to do."""
    names = [s.name for s in plan.stages]
    if hello.contract_version != CONTRACT_VERSION:
        return (
            f"wire contract {hello.contract_version} of the replica is not {CONTRACT_VERSION} of the orchestrator; "
            "use images of one release"
        )
    if hello.stage not in names:
        return f"stage {hello.stage!r} is not in pipeline {plan.pipeline}; its stages are {', '.join(names)}"
    if hello.revision != plan.revision:
        return f"revision {hello.revision} of the replica is not {plan.revision} of the orchestrator"
    if not hello.replica:
        return "replica is empty; give every replica an identity of its own (the pod uid)"
    if not 1 <= hello.capacity <= MAX_CAPACITY:
        return f"capacity {hello.capacity} is not between 1 and {MAX_CAPACITY}"
    if not hello.data_endpoint.startswith(("tcp://", "ipc://")):
        return f"data endpoint {hello.data_endpoint!r} is not tcp://host:port"
    return None
