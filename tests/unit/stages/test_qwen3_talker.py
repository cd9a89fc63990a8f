"""The talker engine against transformers' generate: same codes at every batch size, and never padding for text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.unit.models.videos import noise
from tests.unit.stages.plans import TALKER_EDGE, THINKER_EDGE

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from omni_runtime.errors import EngineError, InvalidRequest
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.chunks import ChunkPolicy
from omni_runtime.stages.engine import Done, EdgeOut, Failed, StageOutput, Started
from omni_runtime.stages.qwen3_omni.decoder import TalkerDecoder
from omni_runtime.stages.qwen3_omni.graphs import Bucket, BucketedSteps
from omni_runtime.stages.qwen3_omni.talker import Qwen3OmniTalkerEngine
from tests.unit.stages.qwen3_reference import Expected, Reference, tiny_model_path
from tests.unit.stages.talker_rig import (
    FEW,
    GREEDY,
    MANY,
    MAX_CODES,
    a_prompt,
    an_engine,
    answers,
    codes_of,
    drain,
    same,
    start,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model_path())


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Expected]:
    return answers(reference, FEW)


@pytest.fixture(scope="module")
def engine() -> Qwen3OmniTalkerEngine:
    return an_engine(8)


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("requests", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_codes_equal_generate_at_every_batch_size(reference: Reference, requests: int, slots: int) -> None:
    expected = answers(reference, requests)
    assert sum(len(e.codes) for e in expected) > 8 * requests, "long enough to overlap"
    engine = an_engine(slots)
    outputs: list[StageOutput] = []
    arrivals = list(range(requests))
    feeds: dict[int, list[Payload]] = {}
    ended = 0
    while ended < requests:
        if arrivals:  # staggered: one more request a step, its rows one chunk a step
            k = arrivals.pop(0)
            start(engine, str(k))
            feeds[k] = expected[k].payloads(sizes=1 + k % 3)
        for k, payloads in feeds.items():
            if payloads:
                engine.feed(str(k), THINKER_EDGE, payloads.pop(0))
        step = engine._step() or []
        ended += sum(isinstance(o, Done) for o in step)
        outputs += step
    wrong = [k for k in range(requests) if not same(codes_of(outputs, str(k)), expected[k])]
    assert wrong == []
    assert engine.stats().running == 0


def test_the_edge_carries_the_same_codes_in_order(engine: Qwen3OmniTalkerEngine, expected: list[Expected]) -> None:
    want = max(expected, key=lambda e: len(e.codes))
    start(engine, "r")
    for payload in want.payloads(sizes=4):
        engine.feed("r", THINKER_EDGE, payload)
    outputs = drain(engine)
    assert isinstance(outputs[0], Started)
    payloads = [o.payload for o in outputs if isinstance(o, EdgeOut)]
    assert [p.rows for p in payloads][:2] == [4, 5]
    assert [p.start for p in payloads] == list(np.cumsum([0] + [p.rows for p in payloads[:-1]]))
    assert payloads[-1].finished
    assert np.array_equal(np.concatenate([p.tensors["codes"] for p in payloads if p.rows]), want.codes)


def test_a_shift_of_one_row_is_noticed(reference: Reference, expected: list[Expected]) -> None:
    shifted = [
        reference.generate(reference.inputs(a_prompt(k)), max_text=4 + k % 9, max_codes=MAX_CODES, shift=1)
        for k in range(4)
    ]
    assert all(not same(s.codes, e) for s, e in zip(shifted, expected, strict=False))


@pytest.mark.parametrize(
    ("mode", "sizing", "waiting", "sizes"),
    [
        ("asyncChunk", "ramp", 0, [4, 5, 4]),
        ("asyncChunk", "adaptive", 0, [4, 4, 4, 1]),
        ("asyncChunk", "adaptive", 3, [4, 5, 4]),
        ("fullPayload", "fixed", 0, [13]),
    ],
)
def test_when_codes_leave_is_the_edges_matter_and_what_they_are_is_not(
    expected: list[Expected], mode: str, sizing: str, waiting: int, sizes: list[int]
) -> None:
    want = next(e for e in expected if len(e.codes) == 13)
    engine = an_engine(1)
    edge = replace(engine._edge, mode=mode, sizing=sizing)
    engine._chunks = ChunkPolicy.of(edge)
    start(engine, "r")
    for payload in want.payloads(sizes=50):
        engine.feed("r", THINKER_EDGE, payload)
    payloads: list[Payload] = []
    while (step := engine._step()) is not None:
        for output in step:
            if isinstance(output, EdgeOut):
                payloads.append(output.payload)
                engine.taken("r", TALKER_EDGE, waiting)
    assert [p.rows for p in payloads] == sizes
    assert [p.finished for p in payloads] == [False] * (len(sizes) - 1) + [True]
    assert np.array_equal(np.concatenate([p.tensors["codes"] for p in payloads]), want.codes)


def test_late_text_stalls_the_row_and_changes_nothing(engine: Qwen3OmniTalkerEngine, expected: list[Expected]) -> None:
    want = max(expected, key=lambda e: len(e.text_ids))
    late, early = want.payloads(sizes=1), expected[0].payloads(sizes=100)
    start(engine, "late")
    start(engine, "early")
    engine.feed("late", THINKER_EDGE, late.pop(0))
    engine.feed("late", THINKER_EDGE, late.pop(0))
    for payload in early:
        engine.feed("early", THINKER_EDGE, payload)
    outputs = drain(engine)
    assert same(codes_of(outputs, "early"), expected[0]), "others go on"
    assert not any(isinstance(o, Done) and o.request == "late" for o in outputs)
    assert engine._step() is None, "stalled: no step without text"
    for payload in late:
        engine.feed("late", THINKER_EDGE, payload)
        outputs += drain(engine)
    assert same(codes_of(outputs, "late"), want)


def test_one_token_answer_is_silence(engine: Qwen3OmniTalkerEngine, reference: Reference) -> None:
    want = reference.generate(reference.inputs(a_prompt(0)), max_text=1, max_codes=MAX_CODES)
    assert len(want.text_ids) == 1
    start(engine, "one")
    for payload in want.payloads(sizes=1):
        engine.feed("one", THINKER_EDGE, payload)
    outputs = drain(engine)
    assert [o.payload.finished for o in outputs if isinstance(o, EdgeOut)] == [True]
    assert isinstance(outputs[-1], Done)
    assert outputs[-1].frames == 0


def test_speech_may_be_bounded_to_nothing(engine: Qwen3OmniTalkerEngine, expected: list[Expected]) -> None:
    start(engine, "r", {**GREEDY, "talker_max_tokens": 1})
    for payload in expected[0].payloads(sizes=9):
        engine.feed("r", THINKER_EDGE, payload)
    done = drain(engine)[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.frames) == ("length", 0)


def test_speech_that_ends_before_it_begins_gives_no_frame(expected: list[Expected]) -> None:
    """transformers fails here: it stacks an empty list."""
    engine = an_engine(2)
    only_the_end = torch.full_like(engine._decoder._suppressed, float("-inf"))
    only_the_end[engine._decoder.end] = 0.0
    engine._decoder._suppressed = only_the_end
    for temperature in (0.0, 0.9):
        start(engine, "r", {**GREEDY, "talker_temperature": temperature})
        for payload in expected[0].payloads(sizes=9):
            engine.feed("r", THINKER_EDGE, payload)
        outputs = drain(engine)
        assert [(o.payload.rows, o.payload.finished) for o in outputs if isinstance(o, EdgeOut)] == [(0, True)]
        done = outputs[-1]
        assert isinstance(done, Done)
        assert (done.finish_reason, done.frames, done.completion_tokens) == ("stop", 0, 1)
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_token_budget_ends_the_speech_with_what_is_there(
    engine: Qwen3OmniTalkerEngine, expected: list[Expected]
) -> None:
    want = max(expected, key=lambda e: len(e.codes))
    start(engine, "r", {**GREEDY, "talker_max_tokens": 8})
    for payload in want.payloads(sizes=9):
        engine.feed("r", THINKER_EDGE, payload)
    outputs = drain(engine)
    done = outputs[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.frames, done.completion_tokens) == ("length", 7, 8)
    assert np.array_equal(codes_of(outputs, "r"), want.codes[:7])


def test_prompts_with_media(engine: Qwen3OmniTalkerEngine, reference: Reference) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    tone = np.sin(np.arange(16_000) / 9).astype(np.float32)
    picture = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))
    content: dict[str, dict[str, Any]] = {
        "audio": {"audio": [tone]},
        "image": {"images": [picture]},
        "video": {"videos": [noise(5)]},
        "audio image video": {"audio": [tone], "images": [picture], "videos": [noise(3, seed=1)]},
    }
    for kinds, media in content.items():
        parts = [{"type": kind} for kind in kinds.split()]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}]
        inputs = reference.inputs(messages, **media)
        want = reference.generate(inputs, max_text=10, max_codes=MAX_CODES)
        said: dict[str, object] = {
            n: inputs[n].reshape(-1).tolist()
            for n in ("image_grid_thw", "video_grid_thw", "video_second_per_grid")
            if n in inputs
        }
        if "audio" in media:
            said["audio_lengths"] = inputs["feature_attention_mask"].sum(-1).tolist()
        start(engine, kinds)
        for payload in want.payloads(sizes=3, media=said):
            engine.feed(kinds, THINKER_EDGE, payload)
        assert same(codes_of(drain(engine), kinds), want), kinds


def sampled(
    engine: Qwen3OmniTalkerEngine, expected: list[Expected], seeds: dict[str, int], tokens: int = 40
) -> dict[str, np.ndarray]:
    """Codes of requests that run together; each its own prompt rows, by its name."""
    for name, seed in seeds.items():
        start(engine, name, {"talker_temperature": 0.9, "talker_max_tokens": tokens, "seed": seed})
        for payload in expected[ord(name[0]) % len(expected)].payloads(sizes=50):
            engine.feed(name, THINKER_EDGE, payload)
    outputs = drain(engine)
    return {name: codes_of(outputs, name) for name in seeds}


def test_sampling_depends_on_the_seed_not_on_the_neighbours_r27(
    engine: Qwen3OmniTalkerEngine, expected: list[Expected]
) -> None:
    alone = sampled(engine, expected, {"a": 7})["a"]
    assert len(alone) > 32, "more frames than random numbers are drawn at once"
    crowd = sampled(engine, expected, {"b": 1, "c": 2, "d": 3, "a": 7, "e": 7, "f": 9, "g": 0, "h": 7})
    assert np.array_equal(alone, crowd["a"])
    assert not np.array_equal(alone, sampled(engine, expected, {"a": 8})["a"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_shape_makes_codes_independent_of_the_batch_in_every_precision_r27(
    expected: list[Expected], dtype: str
) -> None:
    engine = an_engine(8, dtype=dtype, batch_invariant="true")
    alone = sampled(engine, expected, {"a": 7}, tokens=24)["a"]
    crowd = sampled(engine, expected, {"b": 1, "c": 2, "d": 3, "a": 7, "e": 7, "f": 9, "g": 0, "h": 7}, tokens=24)
    assert len(alone) == 23
    assert np.array_equal(alone, crowd["a"])


class Replayed(BucketedSteps):
    """Stands in for CUDA graphs: what a bucket's first step read and wrote is all that later ones may use."""

    def __init__(self, decoder: TalkerDecoder) -> None:
        super().__init__(decoder.step, rows=decoder.slots, length=decoder.length, fixed=False)
        self._decoder = decoder
        self.results: dict[Bucket, Any] = {}
        self._addresses = self._buffers()

    def _buffers(self) -> dict[str, int]:
        tensors = {n: v for n, v in vars(self._decoder).items() if hasattr(v, "data_ptr") and n != "_text_rows"}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def run(self, bucket: Bucket) -> Any:
        if bucket not in self.results:  # trial runs, as before a capture
            before = {
                n: getattr(self._decoder, n).clone() for n in ("_hidden", "_pending", "_place", "_drawn", "_seen")
            }
            self._decoder.while_idle(lambda: [super(Replayed, self).run(bucket) for _ in range(2)] and None)
            assert all(bool((getattr(self._decoder, n) == v).all()) for n, v in before.items()), "a trial changed state"
            self.results[bucket] = super().run(bucket)
        else:
            self.results[bucket].copy_(super().run(bucket))
        assert self._buffers() == self._addresses, "a step that is replayed would read the old place"
        return self.results[bucket]


def test_steps_in_fixed_buffers_and_buckets_equal_generate(expected: list[Expected]) -> None:
    engine = an_engine(4)
    replayed = Replayed(engine._decoder)
    engine._decoder.use(replayed)
    outputs: list[StageOutput] = []
    for k, want in enumerate(expected[:6]):
        start(engine, str(k))
        for payload in want.payloads(sizes=9):
            engine.feed(str(k), THINKER_EDGE, payload)
    outputs = drain(engine)
    assert [k for k in range(6) if not same(codes_of(outputs, str(k)), expected[k])] == []
    assert {b.rows for b in replayed.results} <= {1, 2, 4}
    assert {b.length for b in replayed.results} == {256}


def test_graphs_that_cannot_be_captured_are_off_with_a_reason(expected: list[Expected]) -> None:
    engine = an_engine(2)
    graphs = engine._decoder.graphed(fixed=False)
    engine._decoder.use(graphs)
    if torch.cuda.is_available():
        pytest.skip("here they can")
    start(engine, "r")
    for payload in expected[2].payloads(sizes=9):
        engine.feed("r", THINKER_EDGE, payload)
    assert same(codes_of(drain(engine), "r"), expected[2])
    assert graphs.problem
    graphs.warm()  # changes nothing any more


@pytest.mark.gpu
def test_captured_steps_equal_generate_on_a_gpu(expected: list[Expected]) -> None:
    engine = an_engine(4, device="cuda")
    outputs: list[StageOutput] = []
    for k, want in enumerate(expected[:6]):
        start(engine, str(k))
        for payload in want.payloads(sizes=9):
            engine.feed(str(k), THINKER_EDGE, payload)
    outputs = drain(engine)
    assert engine._decoder._runner.problem is None
    assert [k for k in range(6) if not same(codes_of(outputs, str(k)), expected[k])] == []


def test_abort_frees_the_slot_in_every_state(engine: Qwen3OmniTalkerEngine, expected: list[Expected]) -> None:
    payloads = max(expected, key=lambda e: len(e.text_ids)).payloads(sizes=1)
    for fed in range(4):
        start(engine, "x")
        for payload in payloads[:fed]:
            engine.feed("x", THINKER_EDGE, payload)
            engine._step()
        engine.abort("x")
        engine.feed("x", THINKER_EDGE, payloads[-1])
        assert engine._step() is None
        assert engine.stats().running == engine.stats().waiting == 0


def test_more_requests_than_slots_wait(expected: list[Expected]) -> None:
    engine = an_engine(1)
    for name in ("a", "b"):
        start(engine, name)
        for payload in expected[1].payloads(sizes=50):
            engine.feed(name, THINKER_EDGE, payload)
    engine._step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    outputs = drain(engine)
    assert same(codes_of(outputs, "b"), expected[1])


def test_a_gap_and_a_repeat_are_errors(engine: Qwen3OmniTalkerEngine, expected: list[Expected]) -> None:
    payloads = expected[5].payloads(sizes=1)
    start(engine, "gap")
    engine.feed("gap", THINKER_EDGE, payloads[0])
    with pytest.raises(EngineError, match=r"rows .* are missing"):
        engine.feed("gap", THINKER_EDGE, payloads[2])
    engine.abort("gap")


def test_a_prompt_that_is_too_long_says_so(expected: list[Expected]) -> None:
    engine = an_engine(1, max_prefill_rows="16")
    start(engine, "long")
    for payload in expected[4].payloads(sizes=50):
        engine.feed("long", THINKER_EDGE, payload)
    (failed,) = [o for o in drain(engine) if isinstance(o, Failed)]
    assert failed.code == "CapacityExceeded"
    assert "max_prefill_rows" in failed.message


def test_an_unknown_voice_is_refused_with_the_known_ones_r58(engine: Qwen3OmniTalkerEngine) -> None:
    with pytest.raises(InvalidRequest, match="chelsie, ethan"):
        start(engine, "v", {"voice": "../x"})
