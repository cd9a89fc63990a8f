"""Nodes, pods, quota, tenant and profiles for `omni plan`: from files, from a few words, or from a cluster. I/O only."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.placement import Catalogue, ClusterView, NodeView
from omni_operator.placement.devices import BUILT_IN
from omni_operator.placement.dra import read_class, read_slice
from omni_operator.placement.types import CPU, MEMORY, PODS
from omni_operator.placement.views import (
    belongs_to,
    classes_in_use,
    cluster_view,
    node_view,
    quota_view,
    tenant_view,
    usage,
)
from omni_runtime.deploy.load import load_profiles
from omni_runtime.errors import FieldError, InvalidPipeline, OmniError

MAX_BYTES = 64 << 20
DEADLINE_SECONDS = 60
_WORDS = re.compile(r"(?P<device>[a-z0-9][a-z0-9.-]*)=(?P<nodes>[0-9]{1,4})(x(?P<devices>[0-9]{1,3}))?")
# Of a node that is only named by its devices: enough for the engines of the examples.
CORES_PER_DEVICE, GIB_PER_DEVICE = 16, 160


_READERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "Node": node_view,
    "Pod": lambda pod: usage([pod]),
    "ResourceQuota": quota_view,
    "ResourceSlice": read_slice,
    "DeviceClass": read_class,
}


class ClusterUnreachable(OmniError):
    """kubectl did not answer; the message is its own."""

    code = "ClusterUnreachable"


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. `words`: nodes that are described by a class, filled in when the profiles are known."""

    view: ClusterView = field(default_factory=ClusterView)
    words: tuple[tuple[str, int, int], ...] = ()
    profiles: Mapping[str, OmniRuntimeProfile] = field(default_factory=dict)

    def view_for(self, catalogue: Catalogue) -> ClusterView:
        if not self.words:
            return self.view
        made = tuple(node for word in self.words for node in _nodes_of(*word, catalogue))
        return replace(self.view, nodes=(*(self.view.nodes or ()), *made))


def file_facts(nodes: Sequence[str], autoscaler: bool, domain: str | None) -> Facts:
    """Files and words of --nodes. Raises InvalidPipeline for what is neither."""
    objects: list[dict[str, Any]] = []
    words: list[tuple[str, int, int]] = []
    for text in nodes:
        match = _WORDS.fullmatch(text)
        if match and not Path(text).exists():
            words.append((match["device"], int(match["nodes"]), int(match["devices"] or 0)))
        else:
            objects += _read_objects(Path(text))
    view = _view(objects, None, autoscaler, domain) if objects else ClusterView(
        nodes=() if words else None, nodes_may_be_added=autoscaler, domain_label=domain
    )  # fmt: skip
    return Facts(view, tuple(words))


def cluster_facts(namespace: str, pipeline: str, autoscaler: bool, domain: str | None) -> Facts:
    """Everything that admission would look at. Raises ClusterUnreachable."""
    objects = [
        *_kubectl("nodes"),
        *_kubectl("pods", "--all-namespaces"),
        *_kubectl("resourceslices", optional=True),
        *_kubectl("deviceclasses", optional=True),
        *_kubectl("resourcequotas", "--namespace", namespace),
    ]
    profiles = {
        str(body["metadata"]["name"]): OmniRuntimeProfile.model_validate(body)
        for body in _kubectl("omniruntimeprofiles")
    }
    view = _view(objects, (namespace, pipeline), autoscaler, domain)
    for body in _kubectl("omnitenants"):
        tenant = OmniTenant.model_validate(body)
        if namespace in tenant.spec.namespaces:
            others = [o for o in objects if o.get("kind") == "Pod" and not belongs_to(o, namespace, pipeline)]
            used = classes_in_use(others, tenant.spec.namespaces, Catalogue.of(profiles).classes.values())
            view = replace(view, tenant=tenant_view(tenant, used))
    return Facts(view, profiles=profiles)


def read_profiles(path: Path) -> dict[str, OmniRuntimeProfile]:
    """OmniRuntimeProfiles of a file; or, of the chart's values.yaml, those that it would install."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        content = None  # several documents, or unreadable: the strict reader says what is wrong
    if not isinstance(content, dict) or "kind" in content or not isinstance(content.get("profiles"), dict):
        return load_profiles(path)
    found = {}
    for name, spec in content["profiles"].items():
        if not isinstance(spec, dict):
            raise _no_profile(path, name, "not a mapping")
        if spec.get("enabled", True):
            body = {k: v for k, v in spec.items() if k not in ("enabled", "image")}
            body["images"] = {"runtime": str(spec.get("image", name))}
            try:
                found[name] = OmniRuntimeProfile.model_validate({"metadata": {"name": name}, "spec": body})
            except ValidationError as error:
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
                raise _no_profile(path, name, problem) from error
    return found


def load_prices(path: Path) -> dict[str, float]:
    """Device class -> price. Raises InvalidPipeline for what is no such table."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        prices = {str(name): float(price) for name, price in dict(content).items()}
        if wrong := [name for name, price in prices.items() if not (math.isfinite(price) and price >= 0)]:
            raise ValueError(f"the price of {wrong[0]} is {prices[wrong[0]]}")
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        fix = 'write lines such as "nvidia-h100-80gb: 2.5"'
        raise InvalidPipeline((FieldError(str(path), "", f"no table of prices: {error}", fix),)) from error
    return prices


def _no_profile(path: Path, name: object, problem: str) -> InvalidPipeline:
    fix = "see docs/api-reference.md, or give the chart's values.yaml"
    return InvalidPipeline((FieldError(f"{path}: profiles.{name}", "", problem, fix),))


def _view(
    objects: Iterable[Mapping[str, Any]], pipeline: tuple[str, str] | None, autoscaler: bool, domain: str | None
) -> ClusterView:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for body in objects:
        by_kind.setdefault(str(body.get("kind")), []).append(body)
    return cluster_view(
        by_kind.get("Node", []),
        by_kind.get("Pod", []),
        by_kind.get("ResourceQuota", []),
        slices=by_kind.get("ResourceSlice", []),
        device_classes=by_kind.get("DeviceClass", []),
        pipeline=pipeline,
        nodes_may_be_added=autoscaler,
        domain_label=domain,
    )


def _read_objects(path: Path) -> list[dict[str, Any]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _unreadable(path, f"the file is larger than {MAX_BYTES >> 20} MiB")
        documents = list(
            yaml.load_all(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        )
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(path, " ".join(str(error).split())) from error
    found: list[dict[str, Any]] = []
    for document in documents:
        if isinstance(document, dict):
            items = document.get("items")
            kind = str(document.get("kind", "")).removesuffix("List")
            listed = items if isinstance(items, list) else [document]
            if not all(isinstance(i, dict) and _is_object(i) for i in listed):
                raise _unreadable(path, "it has an item that is no Kubernetes object")
            found += [_checked(path, {"kind": kind, **i}) for i in listed]
    if not any(body.get("kind") == "Node" for body in found):
        raise _unreadable(path, "it has no Node")
    return found


def _checked(path: Path, body: dict[str, Any]) -> dict[str, Any]:
    """The object, if it can be read as what it calls itself; how is `placement.views`' concern."""
    kind, name = str(body.get("kind")), str((body.get("metadata") or {}).get("name"))
    project = _READERS.get(kind)
    try:
        if project is not None:
            project(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"{kind} {name!r} is not as Kubernetes writes it: {error}") from error
    return body


def _is_object(body: Mapping[str, Any]) -> bool:
    return all(isinstance(body.get(part) or {}, dict) for part in ("metadata", "spec", "status"))


def _unreadable(path: Path, why: str) -> InvalidPipeline:
    fix = "give a file of `kubectl get nodes -o yaml`, or CLASS=NODESxDEVICES such as nvidia-h100-80gb=2x8 or cpu=3"
    return InvalidPipeline((FieldError("--nodes", str(path), why, fix),))


def _nodes_of(device: str, count: int, devices: int, catalogue: Catalogue) -> Iterable[NodeView]:
    """Nodes that are described by their devices alone. Raises InvalidPipeline for an unknown class."""
    known = {d.name: d for d in BUILT_IN} | {name: d for (_, name), d in catalogue.classes.items()}
    spec = known.get(device)
    if spec is None:
        names = ", ".join(sorted(known))
        raise InvalidPipeline((FieldError("--nodes", device, "no device class has this name", f"use one of {names}"),))
    size = max(1, devices)
    allocatable = {CPU: size * CORES_PER_DEVICE * 1000, MEMORY: size * GIB_PER_DEVICE << 30, PODS: 110}
    if spec.resource_name and devices:
        allocatable[spec.resource_name] = devices
    labels = dict(spec.node_selector or {})
    return [NodeView(f"{device}-{i}", labels, allocatable=allocatable) for i in range(count)]


def last_words(stderr: str) -> str:
    """What kubectl says to its user, without the lines of its own log before it."""
    lines = [line for line in stderr.splitlines() if line.strip() and not re.match(r"[EWIF][0-9]{4} ", line)]
    return " ".join(lines) or stderr.strip()


def _kubectl(*words: str, optional: bool = False) -> list[dict[str, Any]]:
    """optional: nothing where the server does not know the resource."""
    command = ["kubectl", "get", *words, "-o", "json", f"--request-timeout={DEADLINE_SECONDS}s"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS * 2, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterUnreachable(f"kubectl get {words[0]}: {error}") from error
    if optional and "doesn't have a resource type" in result.stderr:
        return []
    if result.returncode != 0:
        raise ClusterUnreachable(f"kubectl get {words[0]}: {last_words(result.stderr)}")
    listed: list[dict[str, Any]] = json.loads(result.stdout).get("items") or []
    return listed
