"""The webhooks as the chart installs them, on a real API server: the chart's own configuration, with loopback addresses.

The process runs beside the test; `Proxy` stands for the Service in front of several of them.
"""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.apiserver.kube import Kube, Object, Refused
from tests.unit.chart.render import rendered

START_SECONDS = 120.0  # a deadline, not a pause
PROBE_SECONDS = 0.1
FAILURE_THRESHOLD = 3  # the kubelet's default, which the chart leaves alone
ENDPOINT_SECONDS = 0.5  # from the deletion of a pod until no new connection is led there
KINDS = ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")


@dataclass
class WebhookProcess:
    """`python -m omni_webhooks`."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0
    http_port: int = 0
    told_to_end: float | None = None  # when, by time.monotonic

    def events(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:  # an answer that breaks off is the latter
            return 0, str(error)

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def terminate(self) -> None:
        """As the deletion of a pod: SIGTERM, and from then on it is to leave the endpoints."""
        self.told_to_end = time.monotonic()
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As a node that dies, or memory that runs out: nobody is told."""
        self.process.kill()
        self.process.wait(30)

    def metric(self, name: str) -> float:
        """Sum of all series of a metric."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def webhook_process(kubeconfig: Path, log: Path, *arguments: str) -> Iterator[WebhookProcess]:
    """Started, with its ports known; ended with SIGTERM, which must be a clean end."""
    command = [sys.executable, "-m", "omni_webhooks", "--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
    command += ["--hostname", "127.0.0.1", "--poll-seconds", "0.2", "--drain-seconds", "1", *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=output,
            stderr=output,
        )
    running = WebhookProcess(process, log)
    try:
        started = _until(lambda: _started(running), "the process says where it listens", running)
        running.port, running.http_port = started["https"][0][1], started["http"][0][1]
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _started(running: WebhookProcess) -> dict[str, Any] | None:
    if running.process.poll() is not None:
        raise AssertionError(f"ended with {running.process.returncode}: {running.log.read_text()}")
    return next((e for e in running.events() if e["event"] == "webhooks.started"), None)


def _until(check: Callable[[], Any], what: str, running: WebhookProcess, seconds: float = START_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(
                f"{what}: not in {seconds} s; {running.get('/readyz')}; {running.log.read_text()[-4000:]}"
            )
        time.sleep(0.05)


@dataclass
class Installed:
    """The chart's two configurations under a name of this test, with the address of whoever answers."""

    kube: Kube
    name: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")
    values: tuple[str, ...] = ()  # options of helm
    timeout_seconds: int | None = None  # of each call, where a test is about answers and not about how soon they come

    def options(self) -> list[str]:
        return ["--configuration", self.name, "--secret", f"{self.name}-tls", "--namespace", "default"]

    def apply(self, port: int) -> None:
        for kind in KINDS:
            (source,) = [o for o in rendered(*self.values) if o["kind"] == kind]
            configuration = copy.deepcopy(source)
            kept = {"annotations": source["metadata"].get("annotations") or {}}
            configuration["metadata"] = {"name": self.name, **kept}
            for webhook in configuration["webhooks"]:
                service = webhook["clientConfig"].pop("service")
                webhook["timeoutSeconds"] = self.timeout_seconds or webhook["timeoutSeconds"]
                webhook["clientConfig"]["url"] = f"https://127.0.0.1:{port}/{service['path'].strip('/')}"
            self.kube.apply(configuration, manager="helm")

    def get(self, kind: str = KINDS[0]) -> Object:
        return self.kube.get(self._named(kind))

    def remove(self) -> None:
        for kind in KINDS:
            with _ignore_missing():
                self.kube.delete(self._named(kind))
        with _ignore_missing():
            self.kube.delete(self.secret_body())

    def secret_body(self) -> Object:
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{self.name}-tls", "namespace": "default"}}

    def _named(self, kind: str) -> Object:
        return {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": self.name}}


@contextmanager
def _ignore_missing() -> Iterator[None]:
    try:
        yield
    except Refused as error:
        if error.status != 404:
            raise


OPERATOR = "system:serviceaccount:omni-system:omni-operator"  # whom the chart's matchConditions exempt


def create_as_operator(kube: Kube, body: Object) -> Object:
    """As the operator's ServiceAccount, with an administrator's rights: its writes are never asked about."""
    headers = {"Impersonate-User": OPERATOR, "Impersonate-Group": "system:masters"}
    answer = kube.http.request("POST", kube.path(body), json=body, headers=headers)
    stored: Object = answer.json()
    if answer.is_error:
        raise Refused(answer.status_code, stored)
    return stored


def wait_ready(running: WebhookProcess) -> None:
    _until(running.ready, "ready", running)


@contextmanager
def installed_webhooks(kube: Kube, kubeconfig: Path, log: Path, *arguments: str) -> Iterator[WebhookProcess]:
    """One replica, ready, behind the chart's configuration."""
    installed = Installed(kube)
    with webhook_process(kubeconfig, log, *installed.options(), *arguments) as running:
        try:
            installed.apply(running.port)
            wait_ready(running)
            yield running
        finally:
            installed.remove()


class Proxy:
    """What kube-proxy does for a Service: new connections go to its endpoints.

    An endpoint is a pod whose probe has not failed three times in a row, and that was not deleted: the deletion takes
    it away, whatever its probe says. A thread with a loop of its own, so that tests may block.
    """

    def __init__(self, backends: list[WebhookProcess]) -> None:
        self._backends = backends
        self._loop = asyncio.new_event_loop()
        self._next = 0
        self._failed = {backend.log: 0 for backend in backends}  # probes in a row
        self.turned_away = 0  # connections that no process took: it was gone, and still an endpoint
        self.notes: list[str] = []  # what a failure of a test may be due to
        self._pipes: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()
        self.port = 0

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def leads_to(self, backend: WebhookProcess) -> bool:
        gone = backend.told_to_end is not None and time.monotonic() - backend.told_to_end > ENDPOINT_SECONDS
        return backend in self._backends and not gone and self._failed[backend.log] < FAILURE_THRESHOLD

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._pipe, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        probing = [asyncio.create_task(self._probe(backend)) for backend in self._backends]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in (*probing, *self._pipes):
            task.cancel()
        await asyncio.gather(*probing, *self._pipes, return_exceptions=True)

    async def _probe(self, backend: WebhookProcess) -> None:
        before = ""
        while True:
            status, said = await asyncio.to_thread(backend.get, "/readyz")
            self._failed[backend.log] = 0 if status == 200 else self._failed[backend.log] + 1
            if said != before:
                self._note(f"{backend.log.name}: {status} {said.strip()}")
            before = said
            await asyncio.sleep(PROBE_SECONDS)

    def _note(self, what: str) -> None:
        self.notes.append(f"{time.monotonic():.2f} {what}")

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)
        endpoints = [backend for backend in self._backends if self.leads_to(backend)]
        if not endpoints:
            self._note("a connection, and no endpoint")
            writer.close()
            return
        self._next += 1
        backend = endpoints[self._next % len(endpoints)]
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", backend.port)
        except OSError as error:
            self.turned_away += 1
            self._note(f"{backend.log.name} takes no connection: {error}")
            writer.close()
            return
        await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
