"""A small client for tests: one method per verb, refusals as exceptions with the fields that were refused."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import yaml

from omni_crds.wire import to_body

Object = dict[str, Any]
_WRITE_SECONDS = 30
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Cause:
    """One field that the API server refused."""

    field: str
    reason: str
    message: str


class Refused(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, body: Object) -> None:
        super().__init__(f"{status} {body.get('reason', '')}: {body.get('message', '')}")
        self.status = status
        self.reason: str = body.get("reason", "")
        self.message: str = body.get("message", "")
        causes = (body.get("details") or {}).get("causes") or ()
        self.causes = tuple(Cause(c.get("field", ""), c.get("reason", ""), c.get("message", "")) for c in causes)


@dataclass
class Kube:
    """`strict=True` (the default) refuses unknown and duplicate fields, as kubectl does."""

    kubeconfig: Path
    warnings: list[str] = field(default_factory=list)
    """Warnings of the API server since the start; a new one may be a deprecation or a field that it ignored."""

    @cached_property
    def http(self) -> httpx.Client:
        config = yaml.safe_load(self.kubeconfig.read_text())
        context = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
        return httpx.Client(base_url=cluster["server"], verify=_tls(cluster, user), timeout=_WRITE_SECONDS)

    @cached_property
    def _plurals(self) -> dict[tuple[str, str], tuple[str, bool]]:
        return {}

    def resource(self, api_version: str, kind: str) -> tuple[str, bool]:
        """Plural name, and whether it is namespaced."""
        if (api_version, kind) not in self._plurals:
            for entry in self.request("GET", _root(api_version))["resources"]:
                if "/" not in entry["name"]:
                    self._plurals[(api_version, entry["kind"])] = (entry["name"], entry["namespaced"])
        return self._plurals[(api_version, kind)]

    def path(self, obj: Object, *, name: str | None = None, subresource: str = "", namespace: str | None = None) -> str:
        plural, namespaced = self.resource(obj["apiVersion"], obj["kind"])
        where = namespace or obj["metadata"].get("namespace", "default")
        parts = [_root(obj["apiVersion"]), f"namespaces/{where}" if namespaced else "", plural, name or "", subresource]
        return "/".join(part for part in parts if part)

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        **query: str,
    ) -> Object:
        content = None if body is None else to_body(body)
        headers = {} if body is None else {"content-type": content_type}
        answer = self.http.request(method, path, content=content, headers=headers, params=query)
        self.warnings += [w for w in answer.headers.get_list("warning") if w not in self.warnings]
        result: Object = answer.json()
        if answer.is_error:
            raise Refused(answer.status_code, result)
        return result

    def create(self, obj: Object, *, dry_run: bool = False, strict: bool = True) -> Object:
        return self.request("POST", self.path(obj), obj, **_write(dry_run, strict))

    def replace(self, obj: Object, *, subresource: str = "", dry_run: bool = False, strict: bool = True) -> Object:
        path = self.path(obj, name=obj["metadata"]["name"], subresource=subresource)
        return self.request("PUT", path, obj, **_write(dry_run, strict))

    def get(self, obj: Object, *, subresource: str = "") -> Object:
        return self.request("GET", self.path(obj, name=obj["metadata"]["name"], subresource=subresource))

    def apply(self, obj: Object, *, manager: str = "test", force: bool = True, subresource: str = "") -> Object:
        path = self.path(obj, name=obj["metadata"]["name"], subresource=subresource)
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        return self.request("PATCH", path, obj, content_type=APPLY, **query)

    def delete(self, obj: Object) -> Object:
        return self.request("DELETE", self.path(obj, name=obj["metadata"]["name"]))


def _write(dry_run: bool, strict: bool) -> dict[str, str]:
    return {"fieldValidation": "Strict" if strict else "Ignore", **({"dryRun": "All"} if dry_run else {})}


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _tls(cluster: Mapping[str, str], user: Mapping[str, str]) -> ssl.SSLContext:
    from kubernetes.config.kube_config import FileOrData

    def file(source: Mapping[str, str], key: str) -> str:
        return str(FileOrData(dict(source), key).as_file())

    context = ssl.create_default_context(cafile=file(cluster, "certificate-authority"))
    context.load_cert_chain(file(user, "client-certificate"), file(user, "client-key"))
    return context
