"""Streamed code2wav against one decoder run over all frames: same samples, same length (R20, R22)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.stages.plans import TALKER_EDGE, a_context, a_plan

pytest.importorskip("torch")
pytest.importorskip("transformers")

from omni_runtime.deploy.plan import EdgePlan
from omni_runtime.errors import EngineError
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.chunks import ChunkPlanner, ChunkPolicy
from omni_runtime.stages.engine import AudioOut, Done, StageRequest, Started
from omni_runtime.stages.qwen3_omni.code2wav import Qwen3OmniCode2WavEngine
from omni_runtime.topology.types import PayloadContract
from tests.unit.stages.qwen3_reference import Reference, tiny_model_path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model_path())


def an_engine(left: int = 28) -> Qwen3OmniCode2WavEngine:
    plan = a_plan("qwen3_omni_moe", chunk=(4, 25, left), engine_args={"code2wav": {"dtype": "float32"}})
    engine = Qwen3OmniCode2WavEngine(a_context(plan, "code2wav", tiny_model_path()))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def engine() -> Qwen3OmniCode2WavEngine:
    return an_engine()


@pytest.fixture(scope="module")
def engines(engine: Qwen3OmniCode2WavEngine) -> dict[int, Qwen3OmniCode2WavEngine]:
    """By left context; from the receptive field on, more of it changes nothing."""
    return {28: engine, 60: an_engine(60)}


def some_codes(frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (frames, 4)).astype(np.int32)


def chunks(codes: np.ndarray, initial: int, regular: int) -> list[Payload]:
    bounds = [0, *range(initial, len(codes), regular), len(codes)]
    return [
        Payload(start=a, rows=b - a, finished=b == len(codes), tensors={"codes": codes[a:b]})
        for a, b in pairwise(bounds)
        if b > a
    ]


def stream(engine: Qwen3OmniCode2WavEngine, requests: dict[str, list[Payload]]) -> dict[str, np.ndarray]:
    for name in requests:
        engine.submit(StageRequest(name, {}, {}, (TALKER_EDGE,), ()))
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in requests}
    done: set[str] = set()
    queues = {name: list(payloads) for name, payloads in requests.items()}
    while len(done) < len(requests):
        for name, queue in queues.items():
            if queue:
                engine.feed(name, TALKER_EDGE, queue.pop(0))
        for output in engine.poll(0.0):
            if isinstance(output, AudioOut):
                pieces[output.request].append(np.frombuffer(output.pcm, "<f4"))
            elif isinstance(output, Done):
                done.add(output.request)
            else:
                assert isinstance(output, Started)
    return {name: np.concatenate(p) if p else np.zeros(0) for name, p in pieces.items()}


@pytest.mark.parametrize("regular", [1, 7, 25])
@pytest.mark.parametrize("frames", [1, 4, 5, 90])
def test_streamed_equals_one_shot(
    engine: Qwen3OmniCode2WavEngine, reference: Reference, frames: int, regular: int
) -> None:
    codes = some_codes(frames)
    want = reference.decode(codes)
    got = stream(engine, {"r": chunks(codes, 4, regular)})["r"]
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4
    assert np.abs(want).max() > 0.01, "not silence"


def test_a_batch_of_different_lengths_changes_nothing(engine: Qwen3OmniCode2WavEngine, reference: Reference) -> None:
    lengths = {"a": 3, "b": 61, "c": 30, "d": 4}
    codes = {name: some_codes(n, seed=n) for name, n in lengths.items()}
    got = stream(engine, {name: chunks(c, 4, 25) for name, c in codes.items()})
    for name, c in codes.items():
        want = reference.decode(c)
        assert got[name].shape == want.shape
        assert np.abs(got[name] - want).max() <= 1e-4, name


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    frames=st.sampled_from([1, 2, 30, 75, 140]),  # 140: more than one step decodes
    initial=st.integers(2, 30),
    more=st.integers(0, 60),
    left=st.sampled_from([28, 60]),
    sizing=st.sampled_from(["fixed", "ramp", "adaptive"]),
    waiting=st.lists(st.integers(0, 3), max_size=20),
)
def test_full_payload_and_every_chunking_give_the_same_audio(
    engines: dict[int, Qwen3OmniCode2WavEngine],
    reference: Reference,
    frames: int,
    initial: int,
    more: int,
    left: int,
    sizing: str,
    waiting: list[int],
) -> None:
    codes = some_codes(frames, seed=frames)
    want = reference.decode(codes)
    edge = EdgePlan(
        "talker", "code2wav", PayloadContract.CODEC_FRAMES, "asyncChunk", "TCP", initial, initial + more, left, sizing
    )
    whole = replace(edge, mode="fullPayload", initial_frames=0, frames=0)
    engine = engines[left]
    engine.close()  # what an example that failed has left
    got = stream(engine, {"chunked": planned(codes, edge, waiting), "whole": planned(codes, whole, [])})
    for name in ("chunked", "whole"):
        assert got[name].shape == want.shape
        assert np.abs(got[name] - want).max() <= 1e-4, name


def planned(codes: np.ndarray, edge: EdgePlan, waiting: list[int]) -> list[Payload]:
    """As a producer sends them that makes one frame at a time."""
    planner = ChunkPlanner(ChunkPolicy.of(edge))
    sizes: list[int] = []
    feedback = iter(waiting)
    held = 0
    for _ in codes:
        held += 1
        if taken := planner.take(held, flush=False):
            sizes += taken
            held -= sum(taken)
            planner.feedback(next(feedback, 1))
    sizes += planner.take(held, flush=True)
    ends = np.cumsum(sizes)
    return [
        Payload(start=int(e - n), rows=n, finished=bool(e == len(codes)), tensors={"codes": codes[e - n : e]})
        for e, n in zip(ends, sizes, strict=True)
    ]


def test_too_little_context_is_noticed(reference: Reference) -> None:
    codes = some_codes(90)
    got = stream(an_engine(left=4), {"r": chunks(codes, 4, 7)})["r"]
    want = reference.decode(codes)
    assert got.shape == want.shape
    assert np.abs(got - want).max() > 1e-4


def test_an_empty_stream_ends_without_sound(engine: Qwen3OmniCode2WavEngine) -> None:
    assert stream(engine, {"r": [Payload(start=0, rows=0, finished=True)]})["r"].size == 0


def test_codes_outside_the_codebook_are_refused_r29(engine: Qwen3OmniCode2WavEngine) -> None:
    engine.submit(StageRequest("bad", {}, {}, (TALKER_EDGE,), ()))
    with pytest.raises(EngineError, match="below 64"):
        engine.feed(
            "bad", TALKER_EDGE, Payload(start=0, rows=1, finished=False, tensors={"codes": np.full((1, 4), 99)})
        )
    engine.abort("bad")
    assert engine.stats().running == engine.stats().waiting == 0
