"""The certificate in use: kept in a Secret and rotated by the replicas themselves, or read from mounted files.

Helm never renders the Secret, so that no GitOps sync can empty it (T21); one that is deleted or broken is put back from
memory, or made anew. The authority in the webhook configurations is compared and corrected for ever, not only when it
is empty (T54).
"""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from omni_crds.v1alpha1.base import GROUP
from omni_operator.errors import Conflict, KubeError, NotFound
from omni_operator.kinds import SECRET, JsonObject, Kind
from omni_operator.kube import KubeApi
from omni_webhooks import logs, metrics
from omni_webhooks.certs import keys, state
from omni_webhooks.certs.keys import Pair
from omni_webhooks.certs.state import Certificates, Timing

VALIDATING = Kind(
    "admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", False
)
MUTATING = Kind(
    "admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", False
)
# On the Secret: somebody wants a new authority now, whatever the calendar says.
ROTATE_ANNOTATION = f"{GROUP}/rotate"
POLL_SECONDS = 5.0
MAX_CONFLICTS = 5


def server_context() -> ssl.SSLContext:
    """TLS of the webhook server. `load_pair` may be called again at any time; open connections keep what they have."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Each connection carries one call: nobody comes back with a ticket, and they are half the work.
    context.num_tickets = 0
    return context


def load_pair(context: ssl.SSLContext, pair: Pair) -> None:
    """From memory: the key never touches a disk. Raises ssl.SSLError for PEM that does not fit together."""
    handle = os.memfd_create("omni-webhooks-tls", os.MFD_CLOEXEC)
    try:
        os.write(handle, pair.key + b"\n" + pair.cert)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


@dataclass(slots=True)
class Served:
    """What the server shows to clients; one per process."""

    context: ssl.SSLContext = field(default_factory=server_context)
    pair: Pair | None = None

    def use(self, pair: Pair) -> None:
        if pair == self.pair:
            return
        load_pair(self.context, pair)
        self.pair = pair
        until = keys.expires(pair.cert)
        metrics.CERTIFICATE_EXPIRES.set(until.timestamp())
        logs.info("certificate.loaded", until=until.isoformat())


class SelfManaged:
    """The Secret, the webhook configurations, and the certificate in use, brought into line every few seconds.

    Every replica runs this. Writes are compare-and-swap by resourceVersion; who loses reads again in the next round.
    """

    def __init__(
        self,
        kube: KubeApi,
        served: Served,
        *,
        namespace: str,
        secret: str,
        configurations: Sequence[tuple[Kind, str]],
        hosts: Sequence[str],
        timing: Timing | None = None,
        poll_seconds: float = POLL_SECONDS,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._served = served
        self._namespace = namespace
        self._secret = secret
        self._configurations = tuple(configurations)
        self._hosts = tuple(hosts)
        self._timing = timing or Timing()
        self._poll = poll_seconds
        self._now = now
        self._state: Certificates | None = None
        self._installed: tuple[bytes, datetime] | None = None  # bundle, and since when it is seen everywhere
        self._missing: str | None = None  # a configuration
        self._problem: str | None = "certificates were not looked at yet"

    def problem(self) -> str | None:
        """What keeps calls from being trusted; for /readyz."""
        return self._problem

    async def run(self) -> None:
        while True:
            try:
                await self.sync()
                if self._installed and self._served.pair:
                    self._problem = None
                elif self._problem is not None:
                    # Who was ready stays so: a configuration that is missing is missing for all replicas, and the calls
                    # of the other one would find nobody.
                    self._problem = self._missing or "the certificate is not in use yet"
            except Conflict:
                await asyncio.sleep(self._poll / 20)  # another replica was faster: see what it did
                continue
            except KubeError as error:
                # What is served stays valid; a replica that already serves stays ready while the API server is away.
                if self._problem is not None:
                    self._problem = f"certificates: {error}"
                logs.warning("certificates.sync_failed", error=str(error))
            await asyncio.sleep(self._poll)

    async def sync(self) -> None:
        """One round. Raises KubeError; Conflict means that another replica was faster again and again.

        All replicas write at the same moment: who loses looks again at once, since it would not be ready until its next
        round, while the other one may be the one that stops.
        """
        for _ in range(MAX_CONFLICTS):
            try:
                return await self._round()
            except Conflict:
                continue
        raise Conflict("another replica was faster each time")

    async def _round(self) -> None:
        self._missing = None
        # Before the Secret: what is written into a configuration is then never older than what it carries. A replica
        # that stood still in between would put back authorities of before a rotation, and each call would fail.
        configurations = [await self._configuration(kind, name) for kind, name in self._configurations]
        try:
            secret: JsonObject | None = await self._kube.get(SECRET, self._namespace, self._secret)
        except NotFound:
            secret = None
        current = state.decode((secret or {}).get("data") or {})
        if current is None:
            if self._state is not None:
                logs.warning("certificates.put_back", secret=self._secret, found="broken" if secret else "missing")
            current = self._state or state.next_step(None, self._hosts, self._now(), self._timing, installed_for=None)
            assert current is not None, "without a state the next step is a new one"
            secret = await self._store(secret, current)
        configurations = await self._install(current.bundle, configurations)
        wanted = state.next_step(
            current,
            self._hosts,
            self._now(),
            self._timing,
            installed_for=None if self._installed is None else self._now() - self._installed[1],
            rotate=ROTATE_ANNOTATION in (((secret or {}).get("metadata") or {}).get("annotations") or {}),
        )
        if wanted is not None:
            logs.info("certificates.step", trusted=len(wanted.trusted), was=len(current.trusted))
            await self._store(secret, wanted, rotated=len(wanted.trusted) > len(current.trusted))
            current = wanted
            await self._install(current.bundle, configurations)
        self._state = current
        # Serve only what the API server trusts by now; the first certificate has nothing to be compared with.
        if self._installed is not None or self._served.pair is None:
            self._served.use(current.serving)

    async def _store(self, secret: JsonObject | None, wanted: Certificates, *, rotated: bool = False) -> JsonObject:
        data = state.encode(wanted)
        if secret is None:
            body: JsonObject = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": self._secret,
                    "namespace": self._namespace,
                    "labels": {"app.kubernetes.io/managed-by": "omni-webhooks"},
                },
                "type": "kubernetes.io/tls",
                "data": data,
            }
            return await self._kube.create(SECRET, self._namespace, body)
        metadata = dict(secret["metadata"])
        if rotated:  # the request is fulfilled
            annotations = metadata.get("annotations") or {}
            metadata["annotations"] = {k: v for k, v in annotations.items() if k != ROTATE_ANNOTATION}
        return await self._kube.replace(
            SECRET, self._namespace, self._secret, {**secret, "metadata": metadata, "data": data}
        )

    async def _configuration(self, kind: Kind, name: str) -> JsonObject | None:
        try:
            return await self._kube.get(kind, None, name)
        except NotFound:
            self._missing = f"{kind.kind} {name} does not exist"
            return None

    async def _install(self, bundle: bytes, configurations: Sequence[JsonObject | None]) -> list[JsonObject | None]:
        """Put the trusted authorities into every webhook of every configuration, and note since when they are there.

        The configurations as they are then. Raises Conflict when somebody wrote one since it was read.
        """
        encoded = base64.b64encode(bundle).decode()
        now: list[JsonObject | None] = []
        for (kind, name), configuration in zip(self._configurations, configurations, strict=True):
            if configuration is not None and not _carry(configuration, encoded):
                for webhook in configuration.get("webhooks") or ():
                    webhook["clientConfig"] = {**webhook["clientConfig"], "caBundle": encoded}
                configuration = await self._kube.replace(kind, None, name, configuration)
                logs.info("certificates.installed", configuration=name)
            now.append(configuration)
        if None in now:
            self._installed = None
        elif self._installed is None or self._installed[0] != bundle:
            self._installed = (bundle, self._now())
        return now


class Mounted:
    """Certificates that somebody else makes (cert-manager, or a person), mounted as files and read again on change."""

    def __init__(self, folder: Path, served: Served, poll_seconds: float = POLL_SECONDS) -> None:
        self._folder = folder
        self._served = served
        self._poll = poll_seconds
        self._problem: str | None = "certificates were not read yet"

    def problem(self) -> str | None:
        return self._problem

    async def run(self) -> None:
        while True:
            self.sync()
            await asyncio.sleep(self._poll)

    def sync(self) -> None:
        try:
            pair = Pair((self._folder / state.CERT).read_bytes(), (self._folder / state.KEY).read_bytes())
            self._served.use(pair)
            expired = keys.expires(pair.cert) <= datetime.now(UTC)
            self._problem = f"{self._folder / state.CERT} has expired" if expired else None
        except (OSError, ValueError) as error:
            # The kubelet swaps the folder in one step, but cert and key may come from two writers: the next look is right.
            logs.warning("certificates.unreadable", folder=str(self._folder), error=str(error))
            if self._served.pair is None:
                self._problem = f"{self._folder}: {error}"


def _carry(configuration: JsonObject, encoded: str) -> bool:
    webhooks = configuration.get("webhooks") or ()
    return all((w.get("clientConfig") or {}).get("caBundle") == encoded for w in webhooks)
