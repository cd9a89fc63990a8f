"""The chunk planner: whatever the sizes, every frame leaves exactly once, in order, with the context that it needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_runtime.deploy.plan import EdgePlan
from omni_runtime.stages.chunks import ChunkPlanner, ChunkPolicy, context_frames, kept_samples
from omni_runtime.topology.types import PayloadContract


def an_edge(initial: int, frames: int, sizing: str = "fixed", mode: str = "asyncChunk", left: int = 28) -> EdgePlan:
    codes = PayloadContract.CODEC_FRAMES
    return EdgePlan("talker", "code2wav", codes, mode, "SharedMemory", initial, frames, left, sizing)


@st.composite
def policies(draw: st.DrawFn) -> ChunkPolicy:
    initial = draw(st.integers(1, 40))
    frames = draw(st.integers(initial, 120))
    mode = draw(st.sampled_from(["asyncChunk", "asyncChunk", "fullPayload"]))
    return ChunkPolicy.of(an_edge(initial, frames, draw(st.sampled_from(["fixed", "ramp", "adaptive"])), mode))


arrivals = st.lists(st.integers(0, 70), max_size=12)  # frames that come together, such as those of a phrase


def cut(planner: ChunkPlanner, groups: list[int], waiting: list[int], *, flush_each: bool = False) -> list[int]:
    sizes: list[int] = []
    held = 0
    for index, group in enumerate(groups):
        held += group
        taken = planner.take(held, flush=flush_each)
        held -= sum(taken)
        sizes += taken
        if index < len(waiting):
            planner.feedback(waiting[index])
    return [*sizes, *planner.take(held, flush=True)]


@given(policies(), arrivals, st.lists(st.integers(0, 4), max_size=12), st.booleans())
@example(ChunkPolicy(1, 2, adaptive=True), [0, 2], [2], False)  # feedback before the first chunk
def test_every_frame_leaves_once_in_chunks_of_legal_size(
    policy: ChunkPolicy, groups: list[int], waiting: list[int], flush_each: bool
) -> None:
    sizes = cut(ChunkPlanner(policy), groups, waiting, flush_each=flush_each)
    assert sum(sizes) == sum(groups)
    assert all(1 <= size <= max(policy.initial, policy.regular) for size in sizes)
    if sizes and not flush_each:
        assert sizes[0] == min(policy.initial, sum(groups)), "the first chunk is the initial one"


@given(policies(), arrivals, st.integers(1, 60), st.integers(1, 60), st.data())
def test_kept_samples_join_without_gap_or_overlap(
    policy: ChunkPolicy, groups: list[int], left: int, upsample: int, data: Any
) -> None:
    tail = data.draw(st.integers(0, upsample), label="tail")
    end = start = 0
    for size in cut(ChunkPlanner(policy), groups, []):
        context = context_frames(start, left)
        low, high = kept_samples(context, size, upsample, tail)
        before = (start - context) * upsample
        assert before + low == end
        end, start = before + high, start + size
    assert end == max(0, start * upsample - tail)


@given(policies(), arrivals)
def test_a_whole_payload_leaves_at_the_end_alone(policy: ChunkPolicy, groups: list[int]) -> None:
    if not policy.whole:
        return
    planner = ChunkPlanner(policy)
    assert [planner.take(group, flush=False) for group in groups] == [()] * len(groups)


@pytest.mark.parametrize(
    ("sizing", "mode", "waiting", "expected"),
    [
        pytest.param("fixed", "asyncChunk", [], [4, 25, 25, 25, 21], id="fixed"),
        pytest.param("ramp", "asyncChunk", [], [4, 8, 16, 25, 25, 22], id="ramp doubles up to frames"),
        pytest.param("adaptive", "asyncChunk", [], [4] * 25, id="adaptive stays small while nobody is behind"),
        pytest.param(
            "adaptive", "asyncChunk", [2] * 9, [4, 8, 16, 25, 25, 22], id="adaptive grows for a slow consumer"
        ),
        pytest.param("fixed", "fullPayload", [], [100], id="whole"),
    ],
)
def test_sizes(sizing: str, mode: str, waiting: list[int], expected: list[int]) -> None:
    planner = ChunkPlanner(ChunkPolicy.of(an_edge(4, 25, sizing, mode)))
    sizes: list[int] = []
    held = 0
    for _ in range(100):
        held += 1
        if taken := planner.take(held, flush=False):
            sizes += taken
            held -= sum(taken)
            if len(sizes) <= len(waiting):
                planner.feedback(waiting[len(sizes) - 1])
    assert [*sizes, *planner.take(held, flush=True)] == expected


def test_an_adaptive_edge_shrinks_again_when_the_consumer_waits() -> None:
    planner = ChunkPlanner(ChunkPolicy.of(an_edge(4, 32, "adaptive")))
    assert planner.take(4, flush=False) == (4,)
    seen = []
    for waiting in (3, 3, 3, 1, 0, 0, 0, 0):
        planner.feedback(waiting)
        seen.append(planner.take(1000, flush=False)[0])
    assert seen == [8, 16, 32, 32, 16, 8, 4, 4]


def test_a_long_answer_in_one_payload_is_several_messages() -> None:
    planner = ChunkPlanner(ChunkPolicy.of(an_edge(0, 0, mode="fullPayload")))
    assert planner.take(2500, flush=True) == (1024, 1024, 452)
