"""The pods of each pod group, counted. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.names import ENTRY_STAGE
from omni_operator.observed import Live, Observed
from omni_operator.plan.pods import PodProblem, is_active, is_ready, is_scheduled, worst_problem


@dataclass(frozen=True, slots=True)
class GroupView:
    """One pod group (or the entry, leader "entry") as seen now. Counts are pods that are neither ending nor finished."""

    leader: str
    revision: str
    wanted: int
    pods: int
    ready: int
    updated: int  # of the newest revision
    updated_ready: int
    scheduled: int  # of the newest revision
    problem: PodProblem | None
    overdue: bool  # the Deployment of the newest revision passed its progress deadline

    @property
    def complete(self) -> bool:
        return self.updated_ready >= self.wanted and self.pods == self.updated

    @property
    def summary(self) -> str:
        counts = f"{self.updated_ready}/{self.wanted} ready"
        old = f", {self.pods - self.updated} of an older revision" if self.pods > self.updated else ""
        return f"{counts}{old}, {self.problem.reason}" if self.problem else f"{counts}{old}"

    @property
    def detail(self) -> str:
        """Why it is not complete, for a person."""
        return f"{self.summary}: {self.problem.message}" if self.problem else self.summary


def view_group(observed: Observed, leader: str, newest: str, wanted: int) -> GroupView:
    pods = [p for p in observed.pods_of(leader) if is_active(p)]
    updated = [p for p in pods if p.revision == newest]
    deployment = _deployment(observed, leader, newest)
    return GroupView(
        leader=leader,
        revision=newest,
        wanted=wanted,
        pods=len(pods),
        ready=sum(map(is_ready, pods)),
        updated=len(updated),
        updated_ready=sum(map(is_ready, updated)),
        scheduled=sum(map(is_scheduled, updated)),
        problem=_creation_problem(deployment) or worst_problem(updated) or worst_problem(pods),
        overdue=_condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded",
    )


def ready_at(observed: Observed, leader: str, revision: str) -> int:
    return sum(map(is_ready, observed.pods_of(leader, revision)))


def _deployment(observed: Observed, leader: str, newest: str) -> Live | None:
    if leader == ENTRY_STAGE:
        return observed.entry_deployment
    return next((d for d in observed.stage_deployments if d.stage == leader and d.revision == newest), None)


def _creation_problem(deployment: Live | None) -> PodProblem | None:
    """Pods that the API server refuses to create: quota (T65), Pod Security, a webhook. They exist nowhere but here."""
    failure = _condition(deployment, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    message = str(failure.get("message") or "pods are refused")
    # `pods "x-abc12" is forbidden: ...`: the name changes with every try.
    message = message.partition(" is forbidden: ")[2] or message
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in message else Reason.CHILD_REJECTED
    return PodProblem(reason, message)


def _condition(deployment: Live | None, kind: str) -> Mapping[str, str]:
    if deployment is None:
        return {}
    return next((c for c in deployment.status.get("conditions") or [] if c.get("type") == kind), {})
