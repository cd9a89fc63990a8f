"""What the runtime costs around its engines.

    python -m benchmarks.overhead [--json FILE] [--parts relay streams gateway vllm] [--repeats 1]
                                  [--rate 200] [--seconds 30] [--in-flight 1 8 32]

relay, streams and gateway run against stages without a model (`benchmarks._null_stage`): entry, control channel, worker,
sidecar and client are real and share the machine's cores.

relay_ms: from the engine's hands to the client's, one streamed text chunk; relay_audio_ms: a chunk of 0.2 s of audio.
chunk_*_cpu_us: CPU time of entry and worker per chunk, with 32 streams of 40 chunks/s.
gateway_ms: whole answer (not streamed) at `--rate` requests/s with Poisson arrivals; gateway_stream_ms: streamed;
*_cpu_ms: CPU time of one process per request; *_late_ms: how late the client itself was, which is in no other figure.

vllm: text-only requests through a whole smol-omni pipeline against vLLM's own OpenAI server with the same model, engine
arguments and environment, but for the executor, which is vLLM's own there. Short blocks of both alternate, so that what the machine does meanwhile hits both alike.
ttft_ratio_cN, tpot_ratio_cN, e2e_ratio_cN: ours to vLLM's at N requests in flight, of medians over all blocks; _p25 and
_p75: quartiles of the ratios of single pairs of blocks. cpu_ratio_cN: CPU time of all processes, engines included, which
a busy machine changes least. answers_equal: share of prompts whose greedy answer is the same text when asked alone.
"""

from __future__ import annotations

import argparse
import asyncio
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
from benchmarks._client import Timeline, chunk_bytes, errors_of, new_session, send_chat
from benchmarks._load import Request, closed_loop, open_loop
from benchmarks._metrics import quantile, sample_of
from benchmarks._null_stage import Script, stamp_of
from benchmarks._report import machine, report
from benchmarks._servers import Server, null_plan, pipeline, plain_vllm, smol_plan
from omni_runtime.eventloop import settle

PARTS = ("relay", "streams", "gateway", "vllm")
NULL_CONCURRENCY = 256
STREAMS, STREAM_INTERVAL_MS = 32, 25.0
#: In flight -> requests of a block, blocks of each server. Short blocks: the machine changes little within a pair.
BLOCKS = {1: (2, 8), 8: (16, 3), 32: (64, 2)}
PAUSE_SECONDS = (
    1.5  # between blocks: vLLM's processes stay at their queues for a second after an answer, without a pause
)
ANSWER_TOKENS = 32
GATEWAY_ROUNDS = 3
WARM_UP_REQUESTS = 200
DEADLINE_SECONDS = 600.0
SEED = 20

SUBJECTS = ("the sea", "a lighthouse", "winter", "bread", "a bicycle", "rain", "the moon", "a garden", "tea", "a train")
TASKS = ("Tell me about", "Write a short text about", "What should a child know about", "Why do people like")


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
            _checked([await send_chat(http, url, body, on_chunk=on_chunk)])
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
    _checked(timelines)
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
            taken[name] += _checked(
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


# --- against vLLM


def chat_body(prompt: str, model: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def prompts(count: int, seed: int) -> list[str]:
    """All different, so that no server answers from its prefix cache what the other had to compute."""
    numbers = random.Random(seed)
    return [
        f"{numbers.randrange(10**6)}: {numbers.choice(TASKS)} {numbers.choice(SUBJECTS)} and {numbers.choice(SUBJECTS)}."
        for _ in range(count)
    ]


async def compare(
    http: aiohttp.ClientSession,
    ours: Server,
    theirs: Server,
    *,
    model: str,
    repeats: int,
    in_flight: Sequence[int],
) -> dict[str, float]:
    figures: dict[str, float] = {}
    figures["answers_equal"] = await _equal_answers(http, ours, theirs, model)
    for concurrency in in_flight:
        count, blocks = BLOCKS[concurrency]
        for side in (ours, theirs):  # shapes that were not seen before are not what is compared
            await _block(http, side.url, concurrency, 2 * concurrency, model, seed=concurrency)
        pairs: list[tuple[list[Timeline], list[Timeline]]] = []
        cpu = {ours.url: 0.0, theirs.url: 0.0}
        for number in range(repeats * blocks):
            both: dict[bool, list[Timeline]] = {}
            before = ours.cpu_seconds_of_all(), theirs.cpu_seconds_of_all()
            for mine in (True, False) if number % 2 == 0 else (False, True):
                seed = 10_000 * concurrency + 2 * number + mine
                both[mine] = await _block(http, (ours if mine else theirs).url, concurrency, count, model, seed)
            pairs.append((both[True], both[False]))
            for side, used in ((ours, before[0]), (theirs, before[1])):
                cpu[side.url] += side.cpu_seconds_of_all() - used
            told = [
                f"{n} {_median_ms(both[True], n):.0f} / {_median_ms(both[False], n):.0f} ms" for n in ("ttft", "e2e")
            ]
            _tell(f"{concurrency} in flight, pair {number + 1} of {repeats * blocks}: {', '.join(told)}")
        figures[f"cpu_ratio_c{concurrency}"] = cpu[ours.url] / cpu[theirs.url]
        for name in ("ttft", "tpot", "e2e"):
            mine_ms = _median_ms([t for block, _ in pairs for t in block], name)
            plain_ms = _median_ms([t for _, block in pairs for t in block], name)
            ratios = [_median_ms(block, name) / _median_ms(other, name) for block, other in pairs]
            figures[f"{name}_ratio_c{concurrency}"] = mine_ms / plain_ms
            figures[f"{name}_ratio_c{concurrency}_p25"] = quantile(ratios, 25)
            figures[f"{name}_ratio_c{concurrency}_p75"] = quantile(ratios, 75)
            figures[f"{name}_ms_c{concurrency}"] = mine_ms
            figures[f"{name}_vllm_ms_c{concurrency}"] = plain_ms
        ratios_now = ", ".join(f"{n} {figures[f'{n}_ratio_c{concurrency}']:.3f}" for n in ("ttft", "tpot", "e2e"))
        _tell(f"{concurrency} in flight, medians ours / vLLM's: {ratios_now}")
    return figures


def _tell(text: str) -> None:
    print(f"[overhead] {text}", file=sys.stderr, flush=True)


def _median_ms(timelines: list[Timeline], name: str) -> float:
    """name: ttft, tpot or e2e."""
    return 1e3 * quantile([getattr(sample_of(t), f"{name}_s") for t in timelines], 50)


async def _block(
    http: aiohttp.ClientSession, url: str, concurrency: int, count: int, model: str, seed: int
) -> list[Timeline]:
    requests = [Request("text-to-text", chat_body(p, model, ANSWER_TOKENS)) for p in prompts(count, seed)]
    await asyncio.sleep(PAUSE_SECONDS)
    return _checked(await closed_loop(http, url, requests, concurrency=concurrency, deadline_s=DEADLINE_SECONDS))


async def _equal_answers(http: aiohttp.ClientSession, ours: Server, theirs: Server, model: str) -> float:
    """If the two do not answer the same, they were not asked the same, and no ratio means anything."""
    asked = prompts(8, SEED)
    equal = 0
    for prompt in asked:
        body = chat_body(prompt, model, ANSWER_TOKENS)
        mine, plain = _checked([await send_chat(http, side.url, body) for side in (ours, theirs)])
        equal += (mine.answer, mine.prompt_tokens) == (plain.answer, plain.prompt_tokens)
    return equal / len(asked)


def _checked(timelines: list[Timeline]) -> list[Timeline]:
    """A failed request ends the benchmark: what is left out would flatter the figures."""
    for reason, count in errors_of(timelines):
        raise SystemExit(f"{count} of {len(timelines)} requests failed: {reason}")
    return timelines


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
            plan = smol_plan(max(BLOCKS))
            _tell("starting smol-omni and vLLM's own server")
            async with pipeline(plan) as server, plain_vllm(plan) as plain:
                figures |= await compare(
                    http,
                    server,
                    plain,
                    model=plan.model.served_name,
                    repeats=options.repeats,
                    in_flight=options.in_flight,
                )
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=1, help="how often all blocks are measured")
    parser.add_argument("--in-flight", nargs="+", type=int, choices=sorted(BLOCKS), default=sorted(BLOCKS))
    parser.add_argument("--rate", type=float, default=200.0, help="requests/s of gateway")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a measurement without a model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    described = machine()
    report("overhead", described, _servers.run(run(options)), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
