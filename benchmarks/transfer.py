"""How fast tensors move between stages: the connectors against the usual ways, in the same run.

    python -m benchmarks.transfer [--rounds 5] [--ways shm zmq] [--sizes 1KiB] [--json FILE]

Two processes (and the sidecars) on this machine; every way takes its turn in every round, and the best round of each
counts: what else the machine does disturbs all of them alike, and least in the best round.

Figures: shm_vs_block_* (SharedMemory against one new shared-memory block per message, copied in and out: times faster),
shm_vs_queue_*, shm_vs_zmq_* (against multiprocessing.Queue and plain ZeroMQ), shm_us_*, block_us_*, queue_us_*, zmq_us_*
(microseconds per message while a stream runs), shm_chunk_us_p50, zmq_chunk_us_p50 and chunk_us_p50 (one-way latency of
4 KiB now and then: within a pod, by plain ZeroMQ, and engine -> sidecar -> sidecar -> engine over TCP), near_* (SharedMemory
between two pods of one node), *_chunk_1ms_us_p50 (the
same, one every millisecond), hops_us_p50 (now and then by bare sockets through as many processes as between two pods),
tcp_gbps_64MiB and mooncake_gbps_64MiB (GB/s between two sidecars over loopback); memcpy_gbps, aes_gcm_gbps,
loopback_gbps and mooncake_engine_gbps (what the machine gives without us, see _ceilings); sidecar_start_s_* and
sidecar_resident_mb_* (without the arena, after everything).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._ceilings import ceilings
from benchmarks._transports import EDGE, BlockPerMessage, Connector, PlainZeroMq, Queue, Run, Transport
from omni_runtime.deploy.plan import CONTRACT_VERSION, EdgePlan, EntryPlan, ModelRef, ResolvedPlan
from omni_runtime.protocol.channels import generate_keys
from omni_runtime.topology.types import PayloadContract

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1KiB": KIB, "64KiB": 64 * KIB, "1MiB": MIB, "8MiB": 8 * MIB, "64MiB": 64 * MIB}
ARENA_BYTES = 512 * MIB
CHUNK = 4 * KIB
# Between two chunks whose way is measured: as a stage sends them, and dense enough that processes stay in their caches.
PAUSES = {"chunk": 0.004, "chunk_1ms": 0.001}
DEADLINE_SECONDS = 300.0
BUDGET_SECONDS = 1200.0  # of all rounds
_SPAWN = multiprocessing.get_context("spawn")


def messages(size: int) -> int:
    return {KIB: 20_000, MIB: 1000}.get(size, max(6, min(1000, 512 * MIB // size)))


def runs(way: Way, number: int) -> list[Run]:
    sized = [Run(f"{way.name}-{name}-{number}", SIZES[name], messages(SIZES[name])) for name in way.sizes]
    return [*sized, *(Run(f"{way.name}-{name}-{number}", CHUNK, 300, pause) for name, pause in PAUSES.items())]


def plan(kind: str) -> ResolvedPlan:
    """Of a connector, or Near: shared memory between two pods of one node."""
    near = kind == "Near"
    connector = "TCP" if near else kind
    source, _, to = EDGE.partition("->")
    return ResolvedPlan(
        pipeline="bench",
        topology="bench",
        revision="r1",
        contract_version=CONTRACT_VERSION,
        model=ModelRef("packaged://bench", None, "bench"),
        stages=(),
        edges=(EdgePlan(source, to, PayloadContract.THINKER_HIDDEN, "asyncChunk", connector, 1, 1, 0, near=near),),
        entry=EntryPlan("", "", (), "1", "1Gi", 80, 1, (), ()),
        drain_timeout_seconds=5,
        replicas={},
        origins={},
    )


@dataclass(frozen=True, slots=True)
class Running:
    """A sidecar process."""

    pid: int
    start_s: float  # from its launch until it is ready
    url: str

    def resident_mb(self) -> float:
        """Without the arena."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024

    def check(self) -> None:
        """Raises SystemExit if a Mooncake edge went over TCP: its figures would be those of TCP."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        if fallen := [line for line in lines if line.startswith("omni:connector_fallbacks_total")]:
            raise SystemExit(f"Mooncake's engine does not run here (see its sidecar's log): {'; '.join(fallen)}")


@contextmanager
def sidecar(root: Path, name: str) -> Iterator[Running]:
    """A sidecar process that serves root/name."""
    with socket.socket() as first, socket.socket() as second:
        ports = []
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    command = [sys.executable, "-m", "omni_runtime.connectors.sidecar", "--plan", str(root / "plan.json")]
    command += ["--curve", str(root / "curve"), "--ipc-dir", str(root / name), "--arena-bytes", str(ARENA_BYTES)]
    command += ["--advertise-host", "127.0.0.1", "--domain", name, "--data-host", "127.0.0.1", "--data-port", ports[0]]
    if (root / "node").is_dir():
        command += ["--node-dir", str(root / "node")]
    command += ["--http-host", "127.0.0.1", "--http-port", ports[1], "--grace-seconds", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    began = time.monotonic()
    with (root / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stderr=log)
    try:
        url = f"http://127.0.0.1:{ports[1]}"
        _until_ready(process, f"{url}/ready", root / f"{name}.log")
        yield Running(process.pid, time.monotonic() - began, url)
    finally:
        process.terminate()
        process.wait(30)


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the sidecar does not start ({error}): {log.read_text()[-2000:]}") from error
        time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Measured:
    us: float  # per message
    way_us: float  # median, one way


def measure(transport: Transport, root: Path, link: Any, todo: list[Run]) -> list[Measured]:
    """Producer and consumer as processes of their own; one result a run."""
    results: Any = _SPAWN.Queue()
    gates = [_SPAWN.Event() for _ in todo]
    pair = [
        _SPAWN.Process(target=_produce, args=(transport, root, link, todo, gates), daemon=True),
        _SPAWN.Process(target=_consume, args=(transport, root, link, todo, gates, results), daemon=True),
    ]
    for process in pair:
        process.start()
    try:
        found = [Measured(seconds * 1e6, way) for seconds, way in (_next(results, pair) for _ in todo)]
        for process in pair:
            process.join(30)
    finally:
        for process in pair:
            if process.is_alive():
                process.terminate()
    return found


def _next(results: Any, pair: list[Any]) -> tuple[float, float]:
    """A result; raises RuntimeError if it cannot come any more."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            found: tuple[float, float] = results.get(timeout=1)
            return found
        except queue.Empty:
            if failed := [process.exitcode for process in pair if process.exitcode]:
                raise RuntimeError(f"producer or consumer ended with {failed[0]}; see above") from None
    raise RuntimeError(f"no result within {DEADLINE_SECONDS:g} s")


def _produce(transport: Transport, root: Path, link: Any, todo: list[Run], gates: list[Any]) -> None:
    turns = iter(gates)
    transport.produce(root, link, todo, lambda: next(turns).wait())


def _consume(transport: Transport, root: Path, link: Any, todo: list[Run], gates: list[Any], results: Any) -> None:
    turns = iter(gates)
    next(turns).set()

    def done(result: tuple[float, float]) -> None:
        results.put(result)
        if (gate := next(turns, None)) is not None:
            gate.set()

    transport.consume(root, link, todo, done)


def link_of(up: str, down: str) -> dict[str, Any]:
    return {"up": up, "down": down, "producer": _SPAWN.Queue(), "over": _SPAWN.Event()}


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    transport: Transport
    sizes: tuple[str, ...]
    up: str = ""
    down: str = ""
    plan: str = "SharedMemory"


WAYS = (
    Way("shm", Connector(reserve=True), tuple(SIZES), "pod-a", "pod-a"),
    Way("shm_copy", Connector(), tuple(SIZES), "pod-a", "pod-a"),
    Way("block", BlockPerMessage(), tuple(SIZES)),
    Way("queue", Queue(), tuple(SIZES)),
    Way("zmq", PlainZeroMq(), tuple(SIZES)),
    Way("near", Connector(reserve=True), tuple(SIZES), "pod-a", "pod-b", "Near"),
    Way("tcp", Connector(reserve=True), ("1MiB", "64MiB"), "pod-a", "pod-b", "TCP"),
    Way("mooncake", Connector(reserve=True), ("1MiB", "64MiB"), "pod-a", "pod-b", "Mooncake"),
)


def best(rounds: int, ways: tuple[Way, ...], folder: Path, limits: dict[str, float]) -> dict[str, dict[str, Measured]]:
    """For each way and each run the least disturbed round; `limits` is given the best of the ceilings, and what the
    sidecars took: seconds until they were ready, the least of each kind, and megabytes at the end, the most.
    """
    found: dict[str, dict[str, Measured]] = {way.name: {} for way in ways}
    with ExitStack() as stack:
        running: dict[str, list[Running]] = {}
        for kind in sorted({way.plan for way in ways if way.up}):
            root = folder / kind
            root.mkdir()
            generate_keys(root / "curve")
            if kind == "Near":
                (root / "node").mkdir()
            (root / "plan.json").write_bytes(msgspec.json.encode(plan(kind)))
            for name in sorted({end for way in ways if way.plan == kind for end in (way.up, way.down)}):
                running.setdefault(kind, []).append(stack.enter_context(sidecar(root, name)))
        began = time.monotonic()
        for number in range(rounds):
            if number and time.monotonic() - began > BUDGET_SECONDS * number / (number + 1):
                break  # another round would take too long on this machine
            for name, value in ceilings().items():
                best_of = min if "_us_" in name else max
                limits[name] = best_of(value, limits.get(name, value))
            shown = ", ".join(f"{name} {value:.2f}" for name, value in limits.items())
            print(f"[round {number + 1}] {shown}", file=sys.stderr, flush=True)
            for way in ways:
                root = folder / way.plan if way.up else folder / f"{way.name}-{number}"
                root.mkdir(exist_ok=True)
                link = link_of(way.up, way.down) if way.up else _SPAWN.Queue(16)
                todo = runs(way, number)
                for name, got in zip((*way.sizes, *PAUSES), measure(way.transport, root, link, todo), strict=True):
                    before = found[way.name].get(name, got)
                    found[way.name][name] = Measured(min(before.us, got.us), min(before.way_us, got.way_us))
                print(f"[round {number + 1}] {way.name}: {_line(found[way.name])}", file=sys.stderr, flush=True)
                for one in running.get(way.plan, ()) if way.up else ():
                    one.check()
        for kind, sidecars in running.items():
            limits[f"sidecar_start_s_{kind}"] = min(one.start_s for one in sidecars)
            limits[f"sidecar_resident_mb_{kind}"] = max(one.resident_mb() for one in sidecars)
    return found


def _line(results: dict[str, Measured]) -> str:
    streams = ", ".join(f"{name} {m.us:.0f} us" for name, m in results.items() if name not in PAUSES)
    ways = " and ".join(f"{results[name].way_us:.0f} us" for name in PAUSES)
    return f"{streams}; 4 KiB one way, now and then and every ms: {ways}"


def figures(found: dict[str, dict[str, Measured]]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    shm = found.get("shm", {})
    for ours, mine in (("shm", shm), ("shm_copy", found.get("shm_copy", {}))):
        for other in ("block", "queue", "zmq"):
            for name, measured in found.get(other, {}).items():
                if name in mine and name not in PAUSES:
                    numbers[f"{ours}_vs_{other}_{name}"] = measured.us / mine[name].us
    for way in ("tcp", "mooncake"):
        for name, measured in found.get(way, {}).items():
            if name not in PAUSES:
                numbers[f"{way}_gbps_{name}"] = SIZES[name] / measured.us / 1e3
    if "tcp" in found:
        numbers["chunk_us_p50"] = found["tcp"]["chunk"].way_us
    for way, results in found.items():
        for name, measured in results.items():
            if name in PAUSES:
                numbers[f"{way}_{name}_us_p50"] = measured.way_us
            else:
                numbers[f"{way}_us_{name}"] = measured.us
    return numbers


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="only these")
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), help="only these; the latency of 4 KiB in any case")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    described = machine()
    ways = tuple(way for way in WAYS if not options.ways or way.name in options.ways)
    if options.sizes is not None:
        ways = tuple(replace(way, sizes=tuple(name for name in way.sizes if name in options.sizes)) for way in ways)
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        limits: dict[str, float] = {}
        numbers = figures(best(options.rounds, ways, Path(folder), limits)) | limits
    print(f"\n{'figure':<24}{'value':>14}")
    for name, value in numbers.items():
        print(f"{name:<24}{value:>14.2f}")
    if options.json:
        result = {"benchmark": "transfer", "machine": described, "figures": numbers}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
