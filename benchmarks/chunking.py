"""What asyncChunk is worth: smol-omni with every edge in asyncChunk against the same pipeline with fullPayload.

    python -m benchmarks.chunking [--tokens 80] [--rounds 3] [--sizing fixed|ramp|adaptive] [--json FILE]

Both pipelines run as `omni run` lays them out, at the same time, and take turns, so that a busy machine slows both. The
same greedy answer of about 20 s of speech is asked for: alone (C=1) and four at once (C=4).

Figures: ttfp_ratio, rtf_ratio (asyncChunk / fullPayload, C=1; medians of ratios over the rounds), underruns (audible
ones of asyncChunk, C=1 and C=4 together; the player starts at the first chunk), and the values behind them:
ttfp_ms_{async,full}_c{1,4}, rtf_{async,full}_c{1,4}, audio_s.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks._client import new_session
from benchmarks._load import Request, closed_loop
from benchmarks._metrics import AUDIBLE_UNDERRUN_S, Sample, sample_of
from benchmarks._report import machine, report
from benchmarks._servers import local_plan, pipeline, run
from omni_runtime.deploy.plan import ResolvedPlan

EDGES = (("thinker", "talker"), ("talker", "code2wav"))
IN_FLIGHT = (1, 4)
DEADLINE_S = 600.0
LENGTH_SPREAD = 1.3  # in bfloat16 the thinker's words depend on the size of its batch
PROMPT = "Tell me, in plain words and in full sentences, how a river is born and how it finds the sea."


def a_plan(name: str, mode: str, sizing: str | None = None) -> ResolvedPlan:
    edges: list[dict[str, Any]] = [{"from": source, "to": to, "mode": mode} for source, to in EDGES]
    if sizing is not None:
        edges[-1]["chunk"] = {"sizing": sizing}
    model = {"uri": "packaged://smol-omni"}
    return local_plan(name, {"model": model, "topology": "smol_omni", "edges": edges})


def body(model: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "default", "format": "pcm16"},
        "temperature": 0,
        "seed": 0,
        "max_tokens": tokens,
        "stream": True,
    }


async def ask(http: Any, url: str, request: dict[str, Any], concurrency: int) -> list[Sample]:
    requests = [Request("audio", request)] * concurrency
    timelines = await closed_loop(http, url, requests, concurrency=concurrency, deadline_s=DEADLINE_S)
    for timeline in timelines:
        if timeline.error:
            raise SystemExit(f"{url}: {timeline.error}")
    return [sample_of(t) for t in timelines]


async def measure(tokens: int, rounds: int, sizing: str) -> dict[str, float]:
    plans = {"async": a_plan("smol-async", "asyncChunk", sizing), "full": a_plan("smol-full", "fullPayload")}
    samples: dict[tuple[str, int], list[list[Sample]]] = {(m, c): [] for c in IN_FLIGHT for m in plans}
    async with AsyncExitStack() as stack:
        urls = {}
        for mode, plan in plans.items():
            urls[mode] = (await stack.enter_async_context(pipeline(plan))).url
        http = await stack.enter_async_context(new_session())
        requests = {mode: body(plan.model.served_name, tokens) for mode, plan in plans.items()}
        for mode in plans:
            await ask(http, urls[mode], requests[mode], 1)  # warm
        for turn in range(rounds):
            for (mode, concurrency), found in samples.items():
                found.append(await ask(http, urls[mode], requests[mode], concurrency))
                print(f"round {turn + 1}, {mode}, C={concurrency}: {_told(found[-1])}", flush=True)
    return figures(samples)


def figures(samples: dict[tuple[str, int], list[list[Sample]]]) -> dict[str, float]:
    seconds = [s.audio_s for rounds in samples.values() for one in rounds for s in one]
    if max(seconds) > LENGTH_SPREAD * min(seconds):
        raise SystemExit(f"answers differ too much in length: {min(seconds):.1f} to {max(seconds):.1f} s of audio")
    heard = [s for c in IN_FLIGHT for one in samples["async", c] for s in one]
    out = {
        "ttfp_ratio": _ratio(samples["async", 1], samples["full", 1], "ttfp_s"),
        "rtf_ratio": _ratio(samples["async", 1], samples["full", 1], "rtf"),
        "underruns": float(sum(1 for s in heard if s.underrun_s > AUDIBLE_UNDERRUN_S)),
        "ttfp_ratio_c4": _ratio(samples["async", 4], samples["full", 4], "ttfp_s"),
        "rtf_ratio_c4": _ratio(samples["async", 4], samples["full", 4], "rtf"),
        "worst_underrun_ms": 1e3 * max(s.underrun_s for s in heard),
        "audio_s": statistics.median(seconds),
    }
    for (mode, concurrency), rounds in samples.items():
        values = [s for one in rounds for s in one]
        out[f"ttfp_ms_{mode}_c{concurrency}"] = 1e3 * statistics.median(s.ttfp_s for s in values)
        out[f"rtf_{mode}_c{concurrency}"] = statistics.median(s.rtf for s in values)
    return out


def _ratio(numerator: Sequence[Sequence[Sample]], denominator: Sequence[Sequence[Sample]], name: str) -> float:
    """Median over the rounds of the ratio of medians."""

    def middle(samples: Sequence[Sample]) -> float:
        values = [float(getattr(s, name)) for s in samples]
        return math.nan if any(math.isnan(v) for v in values) else statistics.median(values)

    return statistics.median(middle(a) / middle(b) for a, b in zip(numerator, denominator, strict=True))


def _told(samples: Sequence[Sample]) -> str:
    return ", ".join(f"TTFP {s.ttfp_s:.2f} s, RTF {s.rtf:.2f}, silent {s.underrun_s:.2f} s" for s in samples)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunking", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=80, help="of the answer: about a quarter of a second each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizing", choices=("fixed", "ramp", "adaptive"), default="fixed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    described = machine()
    report("chunking", described, run(measure(options.tokens, options.rounds, options.sizing)), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
