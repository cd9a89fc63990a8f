"""Text-only requests through a whole smol-omni pipeline against vLLM's own OpenAI server.

The same model, engine arguments and environment, but for the executor, which is vLLM's own there. Short blocks of both
alternate, so that what the machine does meanwhile hits both alike.

Both are launched anew several times, in turn one first and the other: what a launch gets from the host (most likely
where its memory lies) decides more than what is compared here. Two launches of the very same pipeline side by side were
seen at 0.77 and 1.21 of vLLM's TTFT. Figures are geometric means over launches.

A block with one request in flight begins with a request that is not in its figures: between blocks vLLM's processes
stay at their queues for a second, and after the pause that lets them rest every cache is cold. That first request has
figures of its own (`after_pause`).

ttft_ratio_cN, tpot_ratio_cN, e2e_ratio_cN: ours to vLLM's at N requests in flight, of medians over all blocks of a
launch; _low and _high: the launches between which it lies; _p25 and _p75: quartiles of the ratios of single pairs of
blocks. cpu_ratio_cN: CPU time of all processes, engines included, which a busy machine changes least. answers_equal:
share of prompts whose greedy answer is the same text when asked alone.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from benchmarks._client import Timeline, errors_of, send_chat
from benchmarks._load import Request, closed_loop
from benchmarks._metrics import quantile, sample_of
from benchmarks._servers import Server, pipeline, plain_vllm, smol_plan
from omni_runtime.deploy.plan import ResolvedPlan

DEADLINE_SECONDS: Final = 600.0
PAUSE_SECONDS: Final = 1.5  # between blocks: vLLM's processes stay at their queues for a second after an answer
ANSWER_TOKENS: Final = 32
SEED: Final = 20
NAMES: Final = ("ttft", "tpot", "e2e")

SUBJECTS = ("the sea", "a lighthouse", "winter", "bread", "a bicycle", "rain", "the moon", "a garden", "tea", "a train")
TASKS = ("Tell me about", "Write a short text about", "What should a child know about", "Why do people like")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the blocks with some number of requests in flight. first: how many are sent before, one by one."""

    first: int
    requests: int
    blocks: int


SHAPES: Final = {1: Shape(1, 4, 4), 8: Shape(0, 16, 3), 32: Shape(0, 64, 2)}


@dataclass(frozen=True, slots=True)
class Block:
    first: tuple[Timeline, ...]
    counted: tuple[Timeline, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    ours: Block
    theirs: Block


@dataclass(frozen=True, slots=True)
class Launch:
    """What was measured between a start of both servers and their end. cpu: ours to theirs, by requests in flight."""

    answers_equal: float
    pairs: Mapping[int, Sequence[Pair]]
    cpu: Mapping[int, float]


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


def checked(timelines: list[Timeline]) -> list[Timeline]:
    """A failed request ends the benchmark: what is left out would flatter the figures."""
    for reason, count in errors_of(timelines):
        raise SystemExit(f"{count} of {len(timelines)} requests failed: {reason}")
    return timelines


def tell(text: str) -> None:
    print(f"[overhead] {text}", file=sys.stderr, flush=True)


async def compare(http: aiohttp.ClientSession, *, launches: int, in_flight: Sequence[int]) -> dict[str, float]:
    """Raises SystemExit for a request that failed."""
    plan = smol_plan(max(SHAPES))
    measured = []
    for number in range(launches):
        ours_first = number % 2 == 0
        order = "smol-omni, then vLLM's own server" if ours_first else "vLLM's own server, then smol-omni"
        tell(f"launch {number + 1} of {launches}: starting {order}")
        async with _both(plan, ours_first=ours_first) as (ours, theirs):
            measured.append(await _launch(http, ours, theirs, plan.model.served_name, in_flight, number))
        tell("; ".join(f"{n} in flight, {_told([measured[-1]], n)}" for n in in_flight))
    for concurrency in in_flight:
        tell(f"{concurrency} in flight, ours / vLLM's over all launches: {_told(measured, concurrency)}")
    return figures_of(measured)


@asynccontextmanager
async def _both(plan: ResolvedPlan, *, ours_first: bool) -> AsyncIterator[tuple[Server, Server]]:
    if ours_first:
        async with pipeline(plan) as ours, plain_vllm(plan) as theirs:
            yield ours, theirs
    else:
        async with plain_vllm(plan) as theirs, pipeline(plan) as ours:
            yield ours, theirs


async def _launch(
    http: aiohttp.ClientSession, ours: Server, theirs: Server, model: str, in_flight: Sequence[int], number: int
) -> Launch:
    equal = await _equal_answers(http, ours, theirs, model)
    pairs: dict[int, list[Pair]] = {}
    cpu: dict[int, float] = {}
    for concurrency in in_flight:
        shape = SHAPES[concurrency]
        for side in (ours, theirs):  # shapes that were not seen before are not what is compared
            await _block(http, side.url, concurrency, Shape(0, 2 * concurrency, 1), model, seed=concurrency)
        used = {ours.url: 0.0, theirs.url: 0.0}
        pairs[concurrency] = []
        for index in range(shape.blocks):
            blocks: dict[str, Block] = {}
            for side in (ours, theirs) if index % 2 == 0 else (theirs, ours):
                before = side.cpu_seconds_of_all()
                seed = 10_000 * concurrency + 1_000 * number + 2 * index + (side is ours)
                blocks[side.url] = await _block(http, side.url, concurrency, shape, model, seed)
                used[side.url] += side.cpu_seconds_of_all() - before
            pairs[concurrency].append(Pair(blocks[ours.url], blocks[theirs.url]))
        cpu[concurrency] = used[ours.url] / used[theirs.url]
    return Launch(equal, pairs, cpu)


async def _block(http: aiohttp.ClientSession, url: str, concurrency: int, shape: Shape, model: str, seed: int) -> Block:
    asked = [
        Request("text-to-text", chat_body(p, model, ANSWER_TOKENS)) for p in prompts(shape.first + shape.requests, seed)
    ]
    await asyncio.sleep(PAUSE_SECONDS)
    first = await closed_loop(http, url, asked[: shape.first], concurrency=1, deadline_s=DEADLINE_SECONDS)
    counted = await closed_loop(http, url, asked[shape.first :], concurrency=concurrency, deadline_s=DEADLINE_SECONDS)
    return Block(tuple(checked(first)), tuple(checked(counted)))


async def _equal_answers(http: aiohttp.ClientSession, ours: Server, theirs: Server, model: str) -> float:
    """If the two do not answer the same, they were not asked the same, and no ratio means anything."""
    asked = prompts(8, SEED)
    equal = 0
    for prompt in asked:
        body = chat_body(prompt, model, ANSWER_TOKENS)
        mine, plain = checked([await send_chat(http, side.url, body) for side in (ours, theirs)])
        equal += (mine.answer, mine.prompt_tokens) == (plain.answer, plain.prompt_tokens)
    return equal / len(asked)


def figures_of(launches: Sequence[Launch]) -> dict[str, float]:
    figures = {"answers_equal": min(launch.answers_equal for launch in launches), "launches": float(len(launches))}
    for concurrency in launches[0].pairs:
        end = f"c{concurrency}"
        figures[f"cpu_ratio_{end}"] = _mean(launch.cpu[concurrency] for launch in launches)
        for name in NAMES:
            ratios = [_ratio(launch.pairs[concurrency], name) for launch in launches]
            single = [_ratio([pair], name) for launch in launches for pair in launch.pairs[concurrency]]
            figures[f"{name}_ratio_{end}"] = _mean(ratios)
            figures[f"{name}_ratio_{end}_low"], figures[f"{name}_ratio_{end}_high"] = min(ratios), max(ratios)
            figures |= {f"{name}_ratio_{end}_p{p}": quantile(single, p) for p in (25, 75)}
            pairs = [pair for launch in launches for pair in launch.pairs[concurrency]]
            figures[f"{name}_ms_{end}"] = _median_ms([p.ours.counted for p in pairs], name)
            figures[f"{name}_vllm_ms_{end}"] = _median_ms([p.theirs.counted for p in pairs], name)
        if SHAPES[concurrency].first:
            for name in ("ttft", "e2e"):
                after = (_ratio_of_first(launch.pairs[concurrency], name) for launch in launches)
                figures[f"{name}_ratio_{end}_after_pause"] = _mean(after)
    return figures


def _told(launches: Sequence[Launch], concurrency: int) -> str:
    return ", ".join(f"{n} {_mean(_ratio(launch.pairs[concurrency], n) for launch in launches):.3f}" for n in NAMES)


def _mean(ratios: Iterable[float]) -> float:
    """Geometric: twice as fast and half as fast are one."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def _ratio(pairs: Sequence[Pair], name: str) -> float:
    return _median_ms([p.ours.counted for p in pairs], name) / _median_ms([p.theirs.counted for p in pairs], name)


def _ratio_of_first(pairs: Sequence[Pair], name: str) -> float:
    return _median_ms([p.ours.first for p in pairs], name) / _median_ms([p.theirs.first for p in pairs], name)


def _median_ms(blocks: Sequence[Sequence[Timeline]], name: str) -> float:
    """name: ttft, tpot or e2e."""
    return 1e3 * quantile([getattr(sample_of(t), f"{name}_s") for block in blocks for t in block], 50)
