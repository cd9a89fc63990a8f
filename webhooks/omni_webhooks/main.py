"""`python -m omni_webhooks`: options, start, signals, end. Everything else is elsewhere.

Any number of replicas run at the same time. On SIGTERM a replica says that it is not ready, goes on answering until no
endpoint points at it any more, and ends when the last review is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from omni_operator.credentials import in_cluster_namespace, load_credentials
from omni_operator.kube import Kube
from omni_operator.server import serve
from omni_webhooks import logs, metrics, rbac
from omni_webhooks.cache import measure
from omni_webhooks.certs.rotation import MUTATING, VALIDATING, Mounted, SelfManaged, Served
from omni_webhooks.certs.state import Timing
from omni_webhooks.decision import STALE_SECONDS
from omni_webhooks.listener import Listener
from omni_webhooks.rules import RULES
from omni_webhooks.rules.rule import AnyRule
from omni_webhooks.server import AdmissionServer, select_rules
from omni_webhooks.site import PlacementOptions, Site

LAST_REVIEW_SECONDS = 6.0  # the API server gives up on a call after 5
QUIET_SECONDS = 1.0  # without a call: no endpoint leads here any more


@dataclass(frozen=True, slots=True)
class Options:
    host: str
    port: int
    http_port: int
    namespace: str
    secret: str
    configuration: str
    hosts: tuple[str, ...]
    certificate_dir: Path | None
    timing: Timing
    poll_seconds: float
    stale_seconds: float
    drain_seconds: float
    placement: PlacementOptions
    rules: tuple[AnyRule, ...]
    log_level: str


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m omni_webhooks", description=__doc__)
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104 - calls come from the API server, outside the pod
    parser.add_argument("--port", type=int, default=9443, help="HTTPS for the API server; 0: any free port")
    parser.add_argument("--http-port", type=int, default=8080, help="/livez, /readyz, /metrics; 0: any free port")
    parser.add_argument(
        "--namespace", default=os.environ.get("POD_NAMESPACE") or in_cluster_namespace() or "default",
        help="where the Secret lives; default: the process's own namespace",
    )  # fmt: skip
    parser.add_argument("--secret", default="omni-operator-webhook-tls", help="Secret with the certificates")
    parser.add_argument("--configuration", default="omni-operator", help="name of both webhook configurations")
    parser.add_argument(
        "--hostname", action="append", default=[], help="name in the certificate; may be repeated: those of the Service"
    )
    parser.add_argument(
        "--certificate-dir", type=Path, help="tls.crt and tls.key made by somebody else; without it: our own, rotated"
    )
    parser.add_argument("--settle-seconds", type=float, default=60.0, help="until API servers use a new authority")
    parser.add_argument("--retire-seconds", type=float, default=600.0, help="until all replicas use a new certificate")
    parser.add_argument("--poll-seconds", type=float, default=5.0, help="between two looks at the certificates")
    parser.add_argument(
        "--stale-seconds", type=float, default=STALE_SECONDS, help="age at which a copy decides nothing"
    )
    parser.add_argument("--drain-seconds", type=float, default=8.0, help="from SIGTERM until endpoints have changed")
    parser.add_argument(
        "--ignore-nodes", action="store_true", help="follow no nodes, and check no pipeline against them"
    )
    parser.add_argument("--domain-label", help="node label of the domain in which hot edges should stay")
    parser.add_argument("--disable-rule", action="append", default=[], help="name of a rule that is not asked")
    parser.add_argument("--log-level", default=os.environ.get("OMNI_LOG_LEVEL", "INFO"))
    given = parser.parse_args(arguments)
    try:
        rules = select_rules(RULES, given.disable_rule)
    except ValueError as error:
        parser.error(str(error))
    return Options(
        host=given.host,
        port=given.port,
        http_port=given.http_port,
        namespace=given.namespace,
        secret=given.secret,
        configuration=given.configuration,
        hosts=tuple(given.hostname) or ("localhost",),
        certificate_dir=given.certificate_dir,
        timing=Timing(settle=timedelta(seconds=given.settle_seconds), retire=timedelta(seconds=given.retire_seconds)),
        poll_seconds=given.poll_seconds,
        stale_seconds=given.stale_seconds,
        drain_seconds=given.drain_seconds,
        placement=PlacementOptions(not given.ignore_nodes, given.domain_label),
        rules=rules,
        log_level=given.log_level,
    )


async def run_webhooks(options: Options) -> None:
    """Run until SIGTERM or SIGINT (a clean end) or until something essential ends (an exception)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    kube = Kube(load_credentials, rbac.require)
    site, served = Site(kube, options.placement), Served()
    certificates = _certificates(options, kube, served)
    admission = AdmissionServer(site, options.rules, options.stale_seconds)

    def ready() -> str | None:
        if stop.is_set():
            return "stopping"
        return certificates.problem() or site.problem(options.stale_seconds)

    probes = await serve(
        options.host, options.http_port, alive=lambda: None, ready=ready, registry=metrics.REGISTRY,
        before_metrics=lambda: measure(site.mirrors),
    )  # fmt: skip
    tls = Listener(admission.app(), served.context, admission.stir)
    await tls.start(options.host, options.port)
    logs.info("webhooks.started", https=tls.addresses, http=probes.addresses, rules=len(options.rules))
    tasks = {
        asyncio.create_task(site.run(), name="cache"),
        asyncio.create_task(certificates.run(), name="certificates"),
    }
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()  # raises what ended it
            raise RuntimeError(f"{task.get_name()} ended by itself")
        await _drain(admission, options.drain_seconds)
    finally:
        await tls.close()  # first: what is answered now still needs the rest
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)
        await probes.cleanup()
        await kube.close()


async def _drain(admission: AdmissionServer, seconds: float) -> None:
    """Answer on until the endpoints have changed, then until no call comes any more and the last one is answered."""
    logs.info("webhooks.draining", seconds=seconds)
    await asyncio.sleep(seconds)
    try:
        async with asyncio.timeout(LAST_REVIEW_SECONDS):
            await admission.quiet(QUIET_SECONDS)
    except TimeoutError:
        logs.warning("webhooks.reviews_cut")


def _certificates(options: Options, kube: Kube, served: Served) -> SelfManaged | Mounted:
    if options.certificate_dir is not None:
        return Mounted(options.certificate_dir, served, options.poll_seconds)
    return SelfManaged(
        kube,
        served,
        namespace=options.namespace,
        secret=options.secret,
        configurations=((VALIDATING, options.configuration), (MUTATING, options.configuration)),
        hosts=options.hosts,
        timing=options.timing,
        poll_seconds=options.poll_seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    logs.setup_logging(options.log_level)
    try:
        asyncio.run(run_webhooks(options))
    except Exception as error:  # noqa: BLE001 - the last line of the process; the kubelet restarts it
        logs.error("webhooks.failed", exc_info=True, error=f"{type(error).__name__}: {error}")
        return 1
    return 0
