"""The values that cross the border of the placement package. Frozen, printable, without I/O.

Amounts of Kubernetes resources are whole numbers in one unit per resource: `cpu` in millicores, `memory` and every
other byte resource in bytes, `pods` and extended resources (`nvidia.com/gpu`) in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import FieldError

CPU, MEMORY, PODS = "cpu", "memory", "pods"
Resources = Mapping[str, int]


# ------------------------------------------------------------------------------------------------ the cluster
@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. `used` is what its pods request, without those of the pipeline that is checked.

    memories: resource -> bytes of one device, where a ResourceSlice says it.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Resources = field(default_factory=dict)
    used: Resources = field(default_factory=dict)
    schedulable: bool = True  # Ready, and not cordoned
    memories: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuotaView:
    """A ResourceQuota of the pipeline's namespace. Keys as Kubernetes spells them: `requests.nvidia.com/gpu`, `pods`."""

    name: str
    hard: Resources
    used: Resources = field(default_factory=dict)  # without the pods of the pipeline that is checked


@dataclass(frozen=True, slots=True)
class TenantView:
    """The tenant that the namespace belongs to: devices per class that it may use, and that its others use."""

    name: str
    budget: Mapping[str, int] = field(default_factory=dict)
    used: Mapping[str, int] = field(default_factory=dict)  # without the pipeline that is checked


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What is known of the cluster. `nodes=None`: nothing is, so that only what needs no node is checked.

    nodes_may_be_added: an autoscaler brings nodes like those of `nodes` or `node_shapes`.
    domain_label: node label of the domain in which hot edges should stay, such as topology.kubernetes.io/zone.
    age_seconds: how old the facts are; a verdict repeats it when it is more than a minute.
    """

    nodes: tuple[NodeView, ...] | None = None
    quotas: tuple[QuotaView, ...] = ()
    tenant: TenantView | None = None
    nodes_may_be_added: bool = False
    node_shapes: tuple[NodeView, ...] = ()
    domain_label: str | None = None
    domain_required: bool = False
    age_seconds: float = 0.0


# ------------------------------------------------------------------------------------------------ memory
@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One summand of a device's memory, with where the number is from, so that a person can check the sum."""

    name: str
    bytes: int
    source: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one stage needs on each of its devices.

    capacity: bytes that a process may use of one device. budget: capacity x memoryFraction, which the engine takes.
    terms: what must fit; engines that page their KV cache need it for one request of full length.
    kv_bytes_per_token, kv_full: per device; kv_full is what all requests at full length would take.
    """

    stage: str
    device_class: str
    devices: int
    capacity: int
    budget: int
    terms: tuple[MemoryTerm, ...]
    kv_bytes_per_token: int = 0
    kv_full: int = 0
    known: bool = True  # False: the weights are unknown, so that `terms` proves nothing

    @property
    def need(self) -> int:
        return sum(t.bytes for t in self.terms)

    @property
    def missing(self) -> int:
        """Bytes per device that are not there; 0 where the stage fits."""
        return max(0, self.need - self.budget) if self.known else 0


# ------------------------------------------------------------------------------------------------ the verdict
class ConstraintKind(StrEnum):
    """What stands in the way. One word that tests, metrics and condition reasons can match."""

    DEVICE_MEMORY = "DeviceMemory"  # a stage does not fit its share of a device
    SHARED_DEVICE = "SharedDevice"  # stages that share a device ask for more than it has
    INCOMPATIBLE = "Incompatible"  # dtype, heads, connector, engine flag, port, device class
    NO_NODE = "NoNode"  # no node has the labels and the devices, or none tolerates the pods
    NODE_TOO_SMALL = "NodeTooSmall"  # a replica is larger than every fitting node, even an empty one
    CAPACITY = "Capacity"  # the fitting nodes together have too little left
    FRAGMENTATION = "Fragmentation"  # enough is left in sum, but not in one place
    QUOTA = "Quota"
    TENANT_BUDGET = "TenantBudget"
    DOMAIN = "Domain"  # hot edges cannot stay in one topology domain


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: ConstraintKind
    message: str
    stages: tuple[str, ...] = ()  # by size of their part
    resource: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """One pod on one node. group: the leader's name, or `entry`."""

    group: str
    replica: int
    node: str


@dataclass(frozen=True, slots=True)
class Witness:
    """A placement of every pod that was found; `verify_witness` checks it without the solver."""

    placements: tuple[Placement, ...] = ()
    added_nodes: tuple[NodeView, ...] = ()


@dataclass(frozen=True, slots=True)
class Fix:
    """A change after which the check says Feasible; that was tried, not guessed."""

    text: str
    plan: ResolvedPlan
    cluster: ClusterView
    path: str = ""  # the field to change; empty where the cluster has to change
    value: str = ""


@dataclass(frozen=True, slots=True)
class PlacementWarning:
    """Legal, but unwise. Goes into admission warnings and Events."""

    code: str
    message: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all verdicts say: the memory of each stage, and what is unwise."""

    memory: tuple[StageMemory, ...] = ()
    warnings: tuple[PlacementWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Feasible(Verdict):
    witness: Witness | None = None  # None: the nodes are not known, only what needs none was checked


@dataclass(frozen=True, slots=True)
class FeasibleIfNodesAreAdded(Verdict):
    """Does not fit now; the witness uses `witness.added_nodes`, which an autoscaler would have to bring."""

    constraint: Constraint = Constraint(ConstraintKind.CAPACITY, "")
    witness: Witness = Witness()
    fixes: tuple[Fix, ...] = ()  # that need no node

    @property
    def message(self) -> str:
        return self.constraint.message


@dataclass(frozen=True, slots=True)
class Infeasible(Verdict):
    """Cannot run. errors: every violation with its field path; fixes: the smallest first, each of them checked.

    proven=False: the search ended at its limit without a placement and without a proof that there is none. Nobody
    should be refused for that; say it as a warning.
    """

    constraint: Constraint = Constraint(ConstraintKind.CAPACITY, "")
    errors: tuple[FieldError, ...] = ()
    fixes: tuple[Fix, ...] = ()
    proven: bool = True

    @property
    def message(self) -> str:
        """One line for a condition: what stands in the way, and the smallest change that helps."""
        fix = f"; fix: {self.fixes[0].text}" if self.fixes else ""
        return f"{self.constraint.message}{fix}"


def with_nodes(cluster: ClusterView, *added: NodeView) -> ClusterView:
    return replace(cluster, nodes=(*(cluster.nodes or ()), *added))
