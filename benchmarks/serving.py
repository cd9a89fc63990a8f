"""Load on an OpenAI-compatible server, this project's or another, and what its users would notice.

    python -m benchmarks.serving --url http://127.0.0.1:8000 --concurrency 8 --requests 64
    python -m benchmarks.serving --url ... --rate 2 --seconds 60 --mix text-to-text=1,text-to-speech=1
    python -m benchmarks.serving --url ... --trace AzureLLMInferenceTrace_code.csv --rate 1 --seconds 120
    python -m benchmarks.serving                    # starts smol-omni, 4 clients, 16 spoken answers

Closed loop with --concurrency, open loop with --rate (Poisson; --burstiness below 1 for bursts) or --trace (the moments
and lengths of real traffic; with --rate at that mean rate). Figures: TTFT, TPOT, TTFP, E2E, RTF, underruns (definitions:
`benchmarks._metrics`), p50, p90 and p99; `failed` counts every request without a whole answer, with the reasons printed.
With more than one kind in --mix, figures of each kind follow under its name.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks import _servers
from benchmarks._arrivals import Arrival, UnknownTrace, at_rate, gamma, read_trace, window
from benchmarks._client import Timeline, errors_of, new_session
from benchmarks._load import closed_loop, open_loop
from benchmarks._metrics import summarise
from benchmarks._report import machine, report
from benchmarks._workload import BadMix, Workload, parse_mix

WARM_UP_REQUESTS = 2


def plan_arrivals(options: argparse.Namespace) -> tuple[Arrival, ...]:
    """Of an open loop. Raises UnknownTrace, OSError."""
    numbers = random.Random(options.seed)
    if options.trace is None:
        moments = gamma(options.rate, options.seconds, options.burstiness, numbers)
        return tuple(Arrival(moment) for moment in moments)
    arrivals = read_trace(options.trace)
    if options.rate is not None:
        arrivals = at_rate(arrivals, options.rate)
    return window(arrivals, options.trace_start, options.seconds)


async def measure(options: argparse.Namespace, workload: Workload, url: str) -> tuple[list[Timeline], float]:
    """Every request's timeline, and the seconds that all of them took."""
    async with new_session() as http:
        warm_up = workload.requests([Arrival(0.0)] * options.warm_up, options.seed + 1)
        await closed_loop(http, url, list(warm_up), concurrency=1, deadline_s=options.deadline)
        if options.concurrency is not None:
            requests = list(workload.requests([Arrival(0.0)] * options.requests, options.seed))
            started = time.perf_counter()
            timelines = await closed_loop(
                http, url, requests, concurrency=options.concurrency, deadline_s=options.deadline
            )
        else:
            arrivals = plan_arrivals(options)
            requests = list(workload.requests(arrivals, options.seed))
            started = time.perf_counter()
            timelines = await open_loop(
                http, url, requests, [a.at_s for a in arrivals], deadline_s=options.seconds + options.deadline
            )
        return timelines, time.perf_counter() - started


def figures_of(timelines: Sequence[Timeline], wall_s: float) -> dict[str, float]:
    figures = summarise(timelines, wall_s)
    kinds = sorted({t.kind for t in timelines})
    for kind in kinds if len(kinds) > 1 else ():
        own = summarise([t for t in timelines if t.kind == kind], wall_s)
        figures |= {f"{kind}.{name}": value for name, value in own.items()}
    return figures


@asynccontextmanager
async def server(options: argparse.Namespace) -> AsyncIterator[str]:
    """The one that was named, or a smol-omni of our own."""
    if options.url is not None:
        yield options.url.rstrip("/")
        return
    async with _servers.pipeline(_servers.smol_plan(max(8, options.concurrency or 0))) as own:
        yield own.url


async def run(options: argparse.Namespace, workload: Workload) -> tuple[list[Timeline], float]:
    async with server(options) as url:
        return await measure(options, workload, url)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", help="without /v1; without it, smol-omni is started on this machine")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, help="closed loop: clients [default: 4 without --rate and --trace]")
    load.add_argument("--requests", type=int, default=16, help="closed loop: how many in all")
    load.add_argument("--rate", type=float, help="open loop: requests per second")
    load.add_argument("--burstiness", type=float, default=1.0, help="open loop: shape of the Gamma gaps; 1 = Poisson")
    load.add_argument("--trace", type=Path, help="open loop: Azure CSV or Mooncake .jsonl")
    load.add_argument("--trace-start", type=float, default=0.0, help="seconds of the trace that are left out")
    load.add_argument("--seconds", type=float, default=60.0, help="open loop: how long requests are sent")
    load.add_argument("--deadline", type=float, default=600.0, help="seconds after which what still runs has failed")
    load.add_argument("--warm-up", type=int, default=WARM_UP_REQUESTS, help="requests before the measurement")
    work = parser.add_argument_group("requests")
    work.add_argument("--mix", default="text-to-speech", help="KIND=WEIGHT,...: {text,audio,image}-to-{text,speech}")
    work.add_argument("--prompts", type=Path, help="file with one prompt a line")
    work.add_argument("--max-tokens", type=int, default=64, help="upper bound of every answer")
    work.add_argument("--max-input-tokens", type=int, default=1024, help="upper bound of a trace's prompts")
    work.add_argument("--ignore-eos", action="store_true", help="answers are as long as they may be")
    work.add_argument("--model", help="name to ask for, where the server needs one")
    work.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    open_loop_asked = options.rate is not None or options.trace is not None
    if options.concurrency is not None and open_loop_asked:
        parser.error("--concurrency is a closed loop, --rate and --trace are an open one: use one of them")
    if options.concurrency is None and not open_loop_asked:
        options.concurrency = 4
    for name in ("concurrency", "requests", "rate", "burstiness", "seconds", "deadline", "max_tokens"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')}: {value} is not above 0")
    try:
        mix = parse_mix(options.mix)
        prompts = [p for p in options.prompts.read_text().splitlines() if p.strip()] if options.prompts else []
    except (BadMix, OSError) as error:
        parser.error(str(error))
    workload = Workload(
        mix=mix,
        max_tokens=options.max_tokens,
        max_input_tokens=options.max_input_tokens,
        ignore_eos=options.ignore_eos,
        model=options.model,
        **({"prompts": prompts} if prompts else {}),
    )
    return options, workload


def main(arguments: Sequence[str] | None = None) -> int:
    options, workload = parse(arguments)
    described = machine()
    try:
        timelines, wall_s = _servers.run(run(options, workload))
    except (UnknownTrace, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for reason, count in errors_of(timelines):
        print(f"{count} failed: {reason}", file=sys.stderr)
    report("serving", described, figures_of(timelines, wall_s), options.json)
    return 0 if any(not t.error for t in timelines) else 1


if __name__ == "__main__":
    sys.exit(main())
