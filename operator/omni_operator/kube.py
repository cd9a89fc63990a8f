"""A thin client of the Kubernetes API: get, list, server-side apply, create, delete, status. Raw JSON over aiohttp.

Every call has a timeout, is counted, is checked against the RBAC table, and fails with a class of `errors.py`.
Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import kopf

from omni_crds.wire import to_body
from omni_operator import metrics, rbac
from omni_operator.errors import Transient, Unauthorized, classify
from omni_operator.kinds import JsonObject, Kind

READ_TIMEOUT_SECONDS = 20.0
WRITE_TIMEOUT_SECONDS = 20.0
PAGE_SIZE = 500
WATCH_SLACK_SECONDS = 10.0  # past the end that was agreed with the server: then the connection is dead, not quiet
USER_AGENT = "omni-operator"

APPLY = "application/apply-patch+yaml"  # JSON is YAML; the +json form is newer than the oldest server that we support
MERGE = "application/merge-patch+json"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Listing:
    items: tuple[JsonObject, ...]
    resource_version: str


class KubeApi(Protocol):
    """What the rest of the operator may do to a cluster; unit tests give an in-memory one."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> JsonObject: ...
    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing: ...
    async def create(self, kind: Kind, namespace: str | None, body: JsonObject) -> JsonObject: ...
    async def apply(
        self, kind: Kind, namespace: str | None, name: str, body: JsonObject, *, manager: str, force: bool
    ) -> JsonObject: ...
    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str
    ) -> None: ...
    async def replace(
        self, kind: Kind, namespace: str | None, name: str, body: JsonObject, timeout: float = ...
    ) -> JsonObject: ...
    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, *, resource_version: str, status: Mapping[str, Any]
    ) -> JsonObject: ...
    async def scale(
        self, kind: Kind, namespace: str, name: str, *, replicas: int, resource_version: str, manager: str
    ) -> JsonObject: ...
    async def annotate(
        self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str | None], *, uid: str, manager: str
    ) -> JsonObject: ...


class Kube:
    """The real client. `login` is called at the start and again on every 401.

    require: the RBAC table of the process, see `rbac.require`; raises for a call that the table does not grant.
    """

    def __init__(
        self, login: Callable[[], kopf.ConnectionInfo], require: Callable[[str, str, str], None] = rbac.require
    ) -> None:
        self._login = login
        self._require = require
        self._session: aiohttp.ClientSession | None = None
        self._server = ""
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _open(self) -> aiohttp.ClientSession:
        async with self._opening:
            if self._session is None:
                info = self._login()
                self._server = info.server.rstrip("/")
                ssl = info.as_ssl_context() if self._server.startswith("https") else False
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(ssl=ssl, limit=64),
                    headers={"User-Agent": USER_AGENT, "Accept": JSON, **info.as_http_headers()},
                )
            return self._session

    async def _call(
        self,
        method: str,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str | None = None,
        *,
        subresource: str | None = None,
        params: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = JSON,
        timeout: float,
    ) -> JsonObject:
        self._require(kind.group, f"{kind.plural}/{subresource}" if subresource else kind.plural, verb)
        path = kind.path(namespace, name, subresource)
        for attempt in (1, 2):
            try:
                return await self._send(method, verb, kind, path, params, body, content_type, timeout)
            except Unauthorized:
                # The token was rotated under us: read it again, once.
                await self.close()
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def _send(
        self,
        method: str,
        verb: str,
        kind: Kind,
        path: str,
        params: Mapping[str, str] | None,
        body: JsonObject | None,
        content_type: str,
        timeout: float,
    ) -> JsonObject:
        session = await self._open()
        data = None if body is None else to_body(body)
        outcome = "error"
        try:
            async with session.request(
                method,
                self._server + path,
                params=dict(params or {}),
                data=data,
                headers={"Content-Type": content_type} if data is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                raw = await response.read()
                outcome = str(response.status)
                status = response.status
                retry_after = _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # The write may have been committed; only a fresh read can tell.
            raise Transient(f"{verb} {path}: {type(error).__name__}: {error}") from error
        finally:
            metrics.API_CALLS.labels(kind.plural, verb, outcome).inc()
            if method != "GET":
                metrics.API_WRITES.labels(kind.plural, verb).inc()
        answer = _parse(raw)
        if 200 <= status < 300:
            if answer is None:
                raise Transient(f"{verb} {path}: HTTP {status} with a body that is not a JSON object", status)
            return answer
        raise classify(status, answer, retry_after)

    async def get(
        self, kind: Kind, namespace: str | None, name: str, timeout: float = READ_TIMEOUT_SECONDS
    ) -> JsonObject:
        return await self._call("GET", "get", kind, namespace, name, timeout=timeout)

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        """All objects; a page that expires in the middle starts the whole list again, so it is never partial."""
        items: list[JsonObject] = []
        version = ""
        async for page in self.pages(kind, namespace, selector):
            items.extend(page.items)
            version = page.resource_version
        return Listing(tuple(items), version)

    async def pages(self, kind: Kind, namespace: str | None, selector: str = "") -> AsyncGenerator[Listing, None]:
        """All objects, page by page, for callers that keep little of each. Raises Expired in the middle at worst."""
        token = ""
        while True:
            params = {"limit": str(PAGE_SIZE), **({"labelSelector": selector} if selector else {})}
            if token:
                params["continue"] = token
            answer = await self._call("GET", "list", kind, namespace, params=params, timeout=READ_TIMEOUT_SECONDS)
            meta = answer.get("metadata") or {}
            yield Listing(tuple(answer.get("items") or ()), str(meta.get("resourceVersion") or ""))
            token = str(meta.get("continue") or "")
            if not token:
                return

    async def watch(self, kind: Kind, *, resource_version: str, seconds: int) -> AsyncGenerator[JsonObject, None]:
        """Events of all namespaces after `resource_version`, until the server ends the watch after `seconds`.

        A clean end proves that nothing was missed until then. Raises Expired when the version is too old, Transient
        when the connection breaks or is silent past the agreed end.
        """
        self._require(kind.group, kind.plural, "watch")
        session = await self._open()
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        # Quiet kinds send nothing for the whole time, so the limit on silence is the agreed end.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=seconds + WATCH_SLACK_SECONDS)
        try:
            async with session.get(self._server + kind.path(None), params=params, timeout=timeout) as response:
                metrics.API_CALLS.labels(kind.plural, "watch", str(response.status)).inc()
                if response.status == 401:
                    await self.close()
                if response.status != 200:
                    raise classify(response.status, _parse(await response.read()))
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Transient(f"watch {kind.plural}: {type(error).__name__}: {error}") from error

    async def create(
        self, kind: Kind, namespace: str | None, body: JsonObject, timeout: float = WRITE_TIMEOUT_SECONDS
    ) -> JsonObject:
        return await self._call("POST", "create", kind, namespace, body=body, timeout=timeout)

    async def apply(
        self, kind: Kind, namespace: str | None, name: str, body: JsonObject, *, manager: str, force: bool
    ) -> JsonObject:
        """Server-side apply. Fields of `manager` that are absent from `body` are removed by the server (T6)."""
        self._require(kind.group, kind.plural, "create")  # apply to an object that does not exist is a create
        params = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        return await self._call(
            "PATCH",
            "patch",
            kind,
            namespace,
            name,
            params=params,
            body=body,
            content_type=APPLY,
            timeout=WRITE_TIMEOUT_SECONDS,
        )

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str) -> None:
        """Delete exactly the object that we looked at: a newer one of the same name gives a Conflict."""
        body: JsonObject = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid, "resourceVersion": resource_version},
        }
        await self._call("DELETE", "delete", kind, namespace, name, body=body, timeout=WRITE_TIMEOUT_SECONDS)

    async def replace(
        self, kind: Kind, namespace: str | None, name: str, body: JsonObject, timeout: float = WRITE_TIMEOUT_SECONDS
    ) -> JsonObject:
        return await self._call("PUT", "update", kind, namespace, name, body=body, timeout=timeout)

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, *, resource_version: str, status: Mapping[str, Any]
    ) -> JsonObject:
        """Merge patch of /status that fails with a Conflict when the object moved since it was read."""
        body: JsonObject = {"metadata": {"resourceVersion": resource_version}, "status": dict(status)}
        return await self._call(
            "PATCH",
            "patch",
            kind,
            namespace,
            name,
            subresource="status",
            params={"fieldManager": USER_AGENT},
            body=body,
            content_type=MERGE,
            timeout=WRITE_TIMEOUT_SECONDS,
        )

    async def scale(
        self, kind: Kind, namespace: str, name: str, *, replicas: int, resource_version: str, manager: str
    ) -> JsonObject:
        """Set the count through /scale, as an HPA does; a Conflict when the object moved since it was read."""
        body: JsonObject = {"metadata": {"resourceVersion": resource_version}, "spec": {"replicas": replicas}}
        return await self._call(
            "PATCH",
            "patch",
            kind,
            namespace,
            name,
            subresource="scale",
            params={"fieldManager": manager},
            body=body,
            content_type=MERGE,
            timeout=WRITE_TIMEOUT_SECONDS,
        )

    async def annotate(
        self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str | None], *, uid: str, manager: str
    ) -> JsonObject:
        """Set annotations, or remove those that are None, of this very object: another uid is a Conflict."""
        return await self._call(
            "PATCH",
            "patch",
            kind,
            namespace,
            name,
            params={"fieldManager": manager},
            body={"metadata": {"uid": uid, "annotations": dict(annotations)}},
            content_type=MERGE,
            timeout=WRITE_TIMEOUT_SECONDS,
        )


def _event(line: bytes) -> JsonObject:
    """A watch event; the server's own errors, such as 410, come as events, too."""
    event = _parse(line)
    if event is None:
        raise Transient("watch: a line that is not a JSON object")
    if event.get("type") == "ERROR":
        status = event.get("object") or {}
        raise classify(int(status.get("code") or 0), status)
    return event


def _seconds(header: str | None) -> float | None:
    try:
        return float(header) if header else None
    except ValueError:
        return None


def _parse(raw: bytes) -> JsonObject | None:
    try:
        parsed = json.loads(raw)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
