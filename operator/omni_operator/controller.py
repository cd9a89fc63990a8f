"""The parts of the operator process, put together: queue, workers, Lease, resync. kopf feeds `enqueue`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from omni_operator import logs, metrics
from omni_operator.autoscale.loop import PERIOD_SECONDS, Autoscaler
from omni_operator.autoscale.types import Tuning
from omni_operator.crd_guard import CrdGuard, CrdOutdated
from omni_operator.errors import KubeError, LeadershipLost
from omni_operator.events import EventSink
from omni_operator.fleet import FleetReader
from omni_operator.kinds import PIPELINE
from omni_operator.kube import KubeApi
from omni_operator.lease import LeaseLoop
from omni_operator.observed import Key
from omni_operator.queue import WorkQueue, resync_forever
from omni_operator.reconcile import Cluster, reconcile
from omni_operator.sidecars import SidecarReader
from omni_operator.ttfp import EntryStatusReader

OUTDATED_RETRY_SECONDS = 10.0
# A reconcile is a dozen requests of at most 20 s each; one that takes longer than this hangs.
RECONCILE_DEADLINE_SECONDS = 180.0
# The oldest waiting pipeline may wait this long before the process is called dead: restarts heal what we did not foresee.
STUCK_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    namespaces: tuple[str, ...] = ()  # empty: all
    workers: int = 8
    resync_seconds: float = 300.0
    default_profile: str | None = None
    record_windows: Path | None = None  # a folder; what the autoscaler saw goes there, for `omni replay`
    tuning: Tuning = field(default_factory=Tuning)
    scaling_period_seconds: float = PERIOD_SECONDS


class Controller:
    def __init__(self, kube: KubeApi, lease: LeaseLoop, options: ControllerOptions) -> None:
        self._kube = kube
        self._lease = lease
        self._options = options
        self.queue = WorkQueue()
        self._seen: set[Key] = set()
        self._guard = CrdGuard(kube)
        self._ttfp = EntryStatusReader()
        self._sidecars = SidecarReader()
        events = EventSink(kube)
        fleet = FleetReader(kube)
        self._autoscaler = Autoscaler(
            kube,
            lease.check,
            events,
            record=options.record_windows,
            fleet=fleet,
            tuning=options.tuning,
            period_seconds=options.scaling_period_seconds,
        )
        self._cluster = Cluster(
            kube=kube,
            fence=lease.check,
            events=events,
            guard=self._guard,
            ttfp=self._ttfp,
            sidecars=self._sidecars,
            fleet=fleet,
            autoscaler=self._autoscaler,
            default_profile=options.default_profile,
        )

    def enqueue(self, key: Key, delay: float = 0.0) -> None:
        self._seen.add(key)
        self.queue.add(key, delay)

    def all_keys(self) -> Iterable[Key]:
        return tuple(self._seen)

    async def run(self) -> None:
        """Lead and work until the Lease is lost (LeadershipLost) or cancelled; work stops before the Lease is released."""
        try:
            async with asyncio.TaskGroup() as leading:
                leading.create_task(self._lease.run(), name="lease")
                leading.create_task(self._work_when_leading(), name="work")
        finally:
            await self._ttfp.close()
            await self._sidecars.close()
            await self._autoscaler.close()
            # A cancelled shutdown must not skip the release: the successor would wait for the Lease to run out.
            await asyncio.shield(self._lease.release())

    def alive(self) -> str | None:
        oldest = self.queue.oldest_seconds()
        if self._lease.acquired.is_set() and oldest > STUCK_SECONDS:
            return f"a pipeline has waited {oldest:.0f} s for a worker"
        return None

    def ready(self) -> str | None:
        """Waiting for the Lease is ready (a standby is healthy); outdated CRDs are not."""
        if self._guard.outdated:
            return f"CRDs are older than this operator: {', '.join(self._guard.outdated)}"
        return None

    def measure(self) -> None:
        metrics.QUEUE_OLDEST_SECONDS.set(self.queue.oldest_seconds())

    async def _work_when_leading(self) -> None:
        await self._lease.acquired.wait()
        await self._enqueue_all()
        async with asyncio.TaskGroup() as working:
            for number in range(self._options.workers):
                working.create_task(self._worker(), name=f"worker-{number}")
            working.create_task(
                resync_forever(
                    self.queue,
                    self._list_keys,
                    self.all_keys,
                    period=self._options.resync_seconds,
                    on_error=lambda error: logs.warning("resync.list_failed", error=str(error)),
                ),
                name="resync",
            )
            working.create_task(self._ttfp.refresh_forever(self.queue.add), name="ttfp")
            working.create_task(self._sidecars.refresh_forever(self.queue.add), name="sidecars")
            working.create_task(self._autoscaler.run_forever(self.queue.add), name="autoscaler")

    async def _enqueue_all(self) -> None:
        """The watches list at their start, too; this covers what was missed while another process led."""
        try:
            for key in await self._list_keys():
                self.enqueue(key)
        except KubeError as error:
            logs.warning("resync.list_failed", error=error.message)

    async def _list_keys(self) -> Iterable[Key]:
        scopes = self._options.namespaces or (None,)
        found: list[Key] = []
        for namespace in scopes:
            listing = await self._kube.list(PIPELINE, namespace)
            found.extend(Key(b["metadata"]["namespace"], b["metadata"]["name"]) for b in listing.items)
        metrics.PIPELINES.set(len(found))
        return found

    async def _worker(self) -> None:
        while True:
            item = await self.queue.get()
            started = time.monotonic()
            retry, after, outcome = True, None, "error"
            try:
                async with asyncio.timeout(RECONCILE_DEADLINE_SECONDS):
                    requeue = await reconcile(item.key, self._cluster, lambda: datetime.now(UTC))
                retry, after, outcome = False, requeue.after, "ok"
            except LeadershipLost:
                outcome = "deposed"
                raise  # ends every worker and the process
            except CrdOutdated:
                retry, after, outcome = False, OUTDATED_RETRY_SECONDS, "crd_outdated"
            except KubeError as error:
                outcome = "conflict" if error.status == 409 else "retry"
                if error.status != 409:  # a conflict is ordinary: somebody wrote first
                    logs.warning("reconcile.retry", pipeline=str(item.key), status=error.status, error=error.message)
            except TimeoutError:
                outcome = "timeout"
                logs.error("reconcile.timeout", pipeline=str(item.key), seconds=RECONCILE_DEADLINE_SECONDS)
            except Exception:  # noqa: BLE001 - one pipeline must not take the others down; it is retried and counted
                logs.error("reconcile.failed", exc_info=True, pipeline=str(item.key))
            finally:
                metrics.RECONCILE_SECONDS.observe(time.monotonic() - started)
                metrics.RECONCILES.labels(outcome).inc()
                self.queue.done(item.key, retry=retry, requeue_after=after)
            if outcome == "ok":
                metrics.EVENT_TO_RECONCILED_SECONDS.observe(max(0.0, asyncio.get_running_loop().time() - item.since))
