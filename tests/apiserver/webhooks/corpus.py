"""The corpus: objects with the verdict that admission must give, and the cluster that they are judged against.

`cases/world.yaml` is the cluster, every other file of that folder is a list of cases. Unit tests judge them in memory,
API server tests through the installed webhooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from omni_crds.v1alpha1.base import API_VERSION
from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.placement import Catalogue
from omni_operator.placement.views import node_view, quota_view
from omni_webhooks.context import Context
from omni_webhooks.decision import Review
from omni_webhooks.ledger import Ledger
from omni_webhooks.nodes import Nodes, read_pod
from omni_webhooks.rules.rule import Operation
from tests.unit.chart.render import rendered

CASES = Path(__file__).parent / "cases"
Object = dict[str, Any]
NAMESPACED = ("OmniPipeline", "OmniStage")


@dataclass(frozen=True, slots=True)
class Case:
    """refused: the rule that refuses, at `field` with `message`; `also`: further fields that are named at once."""

    name: str
    kind: str
    namespace: str
    operation: Operation
    spec: Object
    old: Object | None
    refused: str | None
    field: str
    message: str
    also: tuple[str, ...]
    annotations: Mapping[str, str]
    warns: tuple[str, ...]  # the rule, then texts that its warning has

    @property
    def id(self) -> str:
        verb = "" if self.operation is Operation.CREATE else f"{self.operation.value.lower()}-"
        return f"{self.kind}-{verb}{self.refused or (self.warns or ('accepted',))[0]}-{self.name}"

    @property
    def rule(self) -> str | None:
        return self.refused or (self.warns[0] if self.warns else None)

    def body(self, spec: Object | None = None) -> Object:
        metadata: Object = {"name": self.name}
        if self.annotations:
            metadata["annotations"] = dict(self.annotations)
        if self.kind in NAMESPACED:
            metadata["namespace"] = self.namespace
        return {"apiVersion": API_VERSION, "kind": self.kind, "metadata": metadata, "spec": spec or self.spec}

    def review(self) -> Review:
        old = None if self.old is None else self.body(self.old)
        return Review(self.kind, self.operation, self.body(), old)


@lru_cache
def cases() -> tuple[Case, ...]:
    return tuple(_read())


def _read() -> Iterator[Case]:
    for path in sorted(CASES.glob("*.yaml")):
        if path.name == "world.yaml":
            continue
        for entry in yaml.safe_load(path.read_text()):
            assert entry.get("accepted", False) != ("refused" in entry), entry["name"]
            operation = entry.get("operation") or ("UPDATE" if "old" in entry else "CREATE")
            yield Case(
                name=entry["name"],
                kind=entry.get("kind", "OmniPipeline"),
                namespace=entry.get("namespace", "free"),
                operation=Operation(operation),
                spec=entry["spec"],
                old=entry.get("old"),
                refused=entry.get("refused"),
                field=entry.get("field", ""),
                message=entry.get("message", ""),
                also=tuple(entry.get("also", ())),
                annotations=entry.get("annotations", {}),
                warns=tuple(entry.get("warns", ())),
            )


class World:
    """The cluster of the corpus, as objects for an API server and as a context for the rules."""

    def __init__(self) -> None:
        self._given = yaml.safe_load((CASES / "world.yaml").read_text())
        self.namespaces: tuple[str, ...] = tuple(self._given["namespaces"])

    def profiles(self) -> list[Object]:
        own = [_object("OmniRuntimeProfile", name, spec) for name, spec in self._given["profiles"].items()]
        chart = [o for o in rendered() if o["kind"] == "OmniRuntimeProfile"]
        return [{**o, "metadata": {"name": o["metadata"]["name"]}} for o in chart] + own

    def tenants(self) -> list[Object]:
        return [_object("OmniTenant", name, spec) for name, spec in self._given["tenants"].items()]

    def pipelines(self) -> list[Object]:
        found = []
        for key, spec in self._given["pipelines"].items():
            namespace, name = key.split("/")
            body = _object("OmniPipeline", name, spec)
            body["metadata"]["namespace"] = namespace
            found.append(body)
        return found

    def nodes(self) -> list[Object]:
        """With a status, as their kubelets would write it."""
        found = []
        for name, node in self._given["nodes"].items():
            amounts = {"cpu": "128", "memory": "1Ti", "pods": "110", **{k: str(v) for k, v in node["has"].items()}}
            found.append(
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **node["labels"]}},
                    "spec": {"taints": node.get("taints", [])},
                    "status": {
                        "allocatable": amounts,
                        "capacity": amounts,
                        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}],
                    },
                }
            )
        return found

    def pods(self) -> list[Object]:
        return [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"busy-{i}", "namespace": "free"},
                "spec": {
                    "nodeName": pod["node"],
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [
                        {
                            "name": "main",
                            "image": "localhost/busy:1",
                            "resources": {"limits": {k: str(v) for k, v in pod["requests"].items()}},
                        }
                    ],
                },
            }
            for i, pod in enumerate(self._given["pods"])
        ]

    def quotas(self) -> list[Object]:
        return [
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "devices", "namespace": namespace},
                "spec": {"hard": dict(hard)},
            }
            for namespace, hard in self._given["quotas"].items()
        ]

    def context(self) -> Context:
        """What the cache would hold of this world. Fresh each time: a context remembers what it resolved."""
        return replace(self._context, _resolved={}, _fits={})

    @cached_property
    def _context(self) -> Context:
        profiles = {p["metadata"]["name"]: OmniRuntimeProfile.model_validate(p) for p in self.profiles()}
        pipelines = {_key(p): OmniPipeline.model_validate(p) for p in self.pipelines()}
        ledger, nodes = Ledger(), Nodes()
        for key, pipeline in pipelines.items():
            ledger.put(key, pipeline, profiles)
        for node in self.nodes():
            nodes.node_changed(_key(node), node_view(node))
        for pod in self.pods():
            nodes.pod_changed(_key(pod), read_pod(pod))
        quotas = [(q["metadata"]["namespace"], quota_view(q)) for q in self.quotas()]
        return Context(
            profiles=profiles,
            tenants={t["metadata"]["name"]: OmniTenant.model_validate(t) for t in self.tenants()},
            pipelines=pipelines,
            ledger=ledger,
            cluster=lambda key: nodes.view(
                key,
                [quota for namespace, quota in quotas if namespace == key[0]],
                domain_label=None,
                age_seconds=0.0,
            ),
            catalogue=Catalogue.of(profiles),
        )


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> Object:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def _key(body: Object) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]
