"""What the runtime costs around its engines.

    python -m benchmarks.overhead [--json FILE] [--parts relay streams gateway vllm] [--launches 2]
                                  [--rate 200] [--seconds 30] [--in-flight 1 8 32]

relay, streams and gateway run against stages without a model (`benchmarks._null_stage`): entry, control channel, worker,
sidecar and client are real and share the machine's cores.

relay_ms: from the engine's hands to the client's, one streamed text chunk; relay_audio_ms: a chunk of 0.2 s of audio.
chunk_*_cpu_us: CPU time of entry and worker per chunk, with 32 streams of 40 chunks/s.
gateway_ms: whole answer (not streamed) at `--rate` requests/s with Poisson arrivals; gateway_stream_ms: streamed;
*_cpu_ms: CPU time of one process per request; *_late_ms: how late the client itself was, which is in no other figure.

vllm: text-only requests through a whole smol-omni pipeline against vLLM's own OpenAI server (`benchmarks._side_by_side`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import _servers
from benchmarks._arrivals import poisson
from benchmarks._client import Timeline, chunk_bytes, new_session, send_chat
from benchmarks._load import Request, closed_loop, open_loop
from benchmarks._metrics import quantile
from benchmarks._null_stage import Script, stamp_of
from benchmarks._report import machine, report
from benchmarks._servers import Server, null_plan, pipeline
from benchmarks._side_by_side import DEADLINE_SECONDS, SHAPES, checked, compare
from omni_runtime.eventloop import settle

PARTS = ("relay", "streams", "gateway", "vllm")
NULL_CONCURRENCY = 256
STREAMS, STREAM_INTERVAL_MS = 32, 25.0
GATEWAY_ROUNDS = 3
WARM_UP_REQUESTS = 200
SEED = 20


# --- without a model


def script_body(script: Script, *, modalities: tuple[str, ...] = ("text",), stream: bool = True) -> dict[str, Any]:
    content = msgspec.json.encode(script).decode()
    return {
        "messages": [{"role": "user", "content": content}],
        "modalities": list(modalities),
        "audio": {"format": "pcm16"},
        "stream": stream,
    }


async def measure_relay(http: aiohttp.ClientSession, url: str, *, seconds: float) -> dict[str, float]:
    """Chunks come one at a time, so no chunk waits for another."""
    text: list[float] = []
    audio: list[float] = []

    def on_chunk(modality: str, content: str) -> None:
        now = time.monotonic_ns()
        sent = stamp_of(chunk_bytes(content)) if modality == "audio" else int(content)
        (audio if modality == "audio" else text).append((now - sent) / 1e6)

    for modalities in (("text",), ("audio",)):
        for interval_ms in (20.0, 5.0):
            script = Script(chunks=round(seconds * 1000 / interval_ms / 4), interval_ms=interval_ms)
            body = script_body(script, modalities=modalities)
            checked([await send_chat(http, url, body, on_chunk=on_chunk)])
    return {
        "relay_ms_p50": quantile(text, 50),
        "relay_ms_p99": quantile(text, 99),
        "relay_audio_ms_p50": quantile(audio, 50),
        "relay_audio_ms_p99": quantile(audio, 99),
    }


async def measure_streams(http: aiohttp.ClientSession, server: Server, *, seconds: float) -> dict[str, float]:
    """CPU time of one chunk when many streams run, as they do while a model decodes a batch."""
    script = Script(chunks=round(seconds * 1000 / STREAM_INTERVAL_MS), interval_ms=STREAM_INTERVAL_MS)
    request = Request("stream", script_body(script))
    before = _cpu(server)
    started = time.monotonic()
    timelines = await closed_loop(
        http, server.url, [request] * STREAMS, concurrency=STREAMS, deadline_s=seconds + DEADLINE_SECONDS
    )
    wall = time.monotonic() - started
    checked(timelines)
    chunks = sum(len(t.text) for t in timelines)
    figures = {f"chunk_{name}_cpu_us": 1e6 * (used - before[name]) / chunks for name, used in _cpu(server).items()}
    return {"stream_chunks_per_s": chunks / wall, **figures}


def _cpu(server: Server) -> dict[str, float]:
    return {name: server.cpu_seconds(name) for name in ("entry", "thinker")}


async def measure_gateway(
    http: aiohttp.ClientSession, server: Server, *, rate: float, seconds: float
) -> dict[str, float]:
    """Whole and streamed answers in turns: what the machine does meanwhile, and what is warm by then, is the same."""
    url = server.url
    requests = {
        name: Request(name, script_body(Script(), stream=stream))
        for name, stream in (("gateway", False), ("gateway_stream", True))
    }
    taken: dict[str, list[Timeline]] = {name: [] for name in requests}
    cpu = {(name, process): 0.0 for name in requests for process in _cpu(server)}
    for number in range(GATEWAY_ROUNDS):
        for name, request in requests.items():
            arrivals = poisson(rate, seconds / GATEWAY_ROUNDS, random.Random(SEED + number))
            if number == 0:
                await closed_loop(http, url, [request] * WARM_UP_REQUESTS, concurrency=8, deadline_s=60.0)
            before = _cpu(server)
            taken[name] += checked(
                await open_loop(http, url, [request] * len(arrivals), arrivals, deadline_s=seconds + DEADLINE_SECONDS)
            )
            for process, used in _cpu(server).items():
                cpu[name, process] += used - before[process]
    figures: dict[str, float] = {}
    for name, timelines in taken.items():
        spent = [1e3 * t.ended for t in timelines]
        figures |= {f"{name}_ms_p{p}": quantile(spent, p) for p in (50, 90, 99)}
        figures |= {f"{name}_{p}_cpu_ms": 1e3 * used / len(timelines) for (n, p), used in cpu.items() if n == name}
        figures[f"{name}_late_ms_p99"] = quantile([1e3 * t.late_s for t in timelines], 99)
    return figures


# --- command line


async def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with new_session() as http:
        if {"relay", "streams", "gateway"} & set(options.parts):
            async with pipeline(null_plan(NULL_CONCURRENCY), worker="benchmarks._null_stage") as server:
                settle()  # the client shares the cores: a pause of its collector would be read as one of the server
                if "relay" in options.parts:
                    figures |= await measure_relay(http, server.url, seconds=options.seconds)
                if "streams" in options.parts:
                    figures |= await measure_streams(http, server, seconds=options.seconds)
                if "gateway" in options.parts:
                    figures |= await measure_gateway(http, server, rate=options.rate, seconds=options.seconds)
        if "vllm" in options.parts:
            figures |= await compare(http, launches=options.launches, in_flight=options.in_flight)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--launches", type=int, default=2, help="how often smol-omni and vLLM's server are started")
    parser.add_argument("--in-flight", nargs="+", type=int, choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--rate", type=float, default=200.0, help="requests/s of gateway")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a measurement without a model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    if options.launches < 1:
        parser.error(f"--launches: {options.launches}: at least 1; 2 or more to have either server started first")
    described = machine()
    report("overhead", described, _servers.run(run(options)), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
