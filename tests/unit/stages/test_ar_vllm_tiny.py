"""The thinker on vLLM against transformers: text ids equal, every tapped row equal, whatever the batching does."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.models.videos import a_video, noise
from tests.unit.stages.plans import THINKER_EDGE, a_context, a_plan

pytest.importorskip("vllm")

from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.ar_vllm.engine import ArVllmEngine
from omni_runtime.stages.engine import Done, EdgeOut, Failed, StageOutput, StageRequest, TextOut
from tests.unit.stages.qwen3_reference import VIDEO_SIZE, Reference, tiny_model_path

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

TEXT_TOKENS = 24
ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": "512",
    "max_num_batched_tokens": "96",  # prompts are prefilled in several steps
    "kv_cache_memory_bytes": str(4 << 20),  # so little that requests are preempted and computed again
    "limit_mm_per_prompt": '{"audio":1,"image":1,"video":1}',
    "mm_processor_kwargs": json.dumps({"size": VIDEO_SIZE}),
}


@pytest.fixture(scope="module", params=["hooks", "aux"])
def engine(request: pytest.FixtureRequest) -> Iterator[ArVllmEngine]:
    plan = a_plan("qwen3_omni_moe", engine_args={"thinker": {**ENGINE_ARGS, "tap": request.param}})
    engine = ArVllmEngine(a_context(plan, "thinker", tiny_model_path()))
    engine.load()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model_path())


def wav(samples: np.ndarray) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def a_chat(k: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages for the engine, and what the reference's processor takes beside them."""
    from PIL import Image

    rng = np.random.default_rng(k)
    text = {"type": "text", "text": f"tell me more about number {k} please" * (1 + k % 3)}
    if k % 4 == 3:
        frames = noise(2 + k % 3, seed=k)
        part = {"type": "video", "data": a_video(frames), "media_type": "video/mp4"}
        if k == 11:
            tone = np.sin(np.arange(16_000) / 9).astype(np.float32)
            sound = {"type": "audio", "data": wav(tone), "format": "wav"}
            return [{"role": "user", "content": [part, sound, text]}], {"videos": [frames], "audio": [tone]}
        return [{"role": "user", "content": [part, text]}], {"videos": [frames]}
    if k % 3 == 1:
        tone = (0.5 * np.sin(np.arange(16_000) / (5 + k))).astype(np.float32)
        part = {"type": "audio", "data": wav(tone), "format": "wav"}
        return [{"role": "user", "content": [part, text]}], {"audio": [tone]}
    if k % 3 == 2:
        pixels = rng.integers(0, 255, (32, 24, 3), dtype=np.uint8)
        part = {"type": "image", "data": png(pixels), "media_type": "image/png"}
        return [{"role": "user", "content": [part, text]}], {"images": [Image.fromarray(pixels)]}
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": [text]}], {}


def submit(
    engine: ArVllmEngine, name: str, messages: list[dict[str, Any]], *, rows: bool = True, **params: object
) -> None:
    settings = {"max_tokens": TEXT_TOKENS, "return_token_ids": True, **params}
    edges = (THINKER_EDGE,) if rows else ()
    engine.submit(StageRequest(name, settings, {"messages": messages}, (), edges))


def collect(engine: ArVllmEngine, count: int) -> list[StageOutput]:
    outputs: list[StageOutput] = []
    while sum(isinstance(o, Done | Failed) for o in outputs) < count:
        outputs += engine.poll(1.0)
    return outputs


def ids_of(outputs: list[StageOutput], name: str) -> list[int]:
    return [t for o in outputs if isinstance(o, TextOut) and o.request == name for t in o.token_ids]


def rows_of(outputs: list[StageOutput], name: str) -> list[Payload]:
    return [o.payload.joined() for o in outputs if isinstance(o, EdgeOut) and o.request == name]


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the bytes, for the reference's chat template."""
    return [
        {
            **m,
            "content": m["content"]
            if isinstance(m["content"], str)
            else [{k: v for k, v in p.items() if k != "data"} for p in m["content"]],
        }
        for m in messages
    ]


def test_ids_and_rows_equal_transformers(engine: ArVllmEngine, reference: Reference) -> None:
    count = 12
    chats = [a_chat(k) for k in range(count)]
    for k, (messages, _) in enumerate(chats):
        submit(engine, f"r{k}", messages)
    outputs = collect(engine, count)
    assert [o for o in outputs if isinstance(o, Failed)] == []
    for k, (messages, media) in enumerate(chats):
        want = reference.generate(reference.inputs(plain(messages), **media), max_text=TEXT_TOKENS, max_codes=2)
        assert ids_of(outputs, f"r{k}") == want.text_ids, k
        payloads = rows_of(outputs, f"r{k}")
        assert [p.start for p in payloads] == list(np.cumsum([0] + [p.rows for p in payloads[:-1]]))
        assert [p.finished for p in payloads] == [False] * (len(payloads) - 1) + [True]
        assert payloads[0].meta["prompt_tokens"] == len(want.prompt_ids)
        assert payloads[-1].meta["output_tokens"] == len(want.text_ids)
        full = [p for p in payloads if p.rows]
        assert (
            np.concatenate([p.tensors["token_ids"] for p in full]).tolist() == [*want.prompt_ids, *want.text_ids][:-1]
        )
        for name, expected in (("embed", want.embed), ("hidden", want.hidden)):
            got = np.concatenate([p.tensors[name] for p in full])
            assert got.shape == expected.shape
            assert np.abs(got - expected).max() < 1e-3, (k, name)
            assert np.abs(got[1:] - expected[:-1]).max() > 1e-2, "a shift of one row would be noticed"


def test_text_only_gives_no_rows(engine: ArVllmEngine) -> None:
    submit(engine, "t", a_chat(0)[0], rows=False)
    outputs = collect(engine, 1)
    assert rows_of(outputs, "t") == []
    assert len(ids_of(outputs, "t")) > 0


def test_one_token(engine: ArVllmEngine) -> None:
    submit(engine, "one", a_chat(0)[0], max_tokens=1)
    outputs = collect(engine, 1)
    payloads = rows_of(outputs, "one")
    assert sum(p.rows for p in payloads) == payloads[0].meta["prompt_tokens"]
    assert payloads[-1].meta["output_tokens"] == 1


def test_abort_gives_nothing_more(engine: ArVllmEngine) -> None:
    submit(engine, "gone", a_chat(3)[0], max_tokens=400, ignore_eos=True)
    for _ in range(3):
        engine.poll(1.0)
    engine.abort("gone")
    submit(engine, "next", a_chat(0)[0])
    assert {o.request for o in collect(engine, 1)} == {"next"}
    assert engine.stats().running == 0


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [{"role": "user", "content": [{"type": "audio", "data": b"x", "format": "wav"}]}],
            r"content\[0\]: not an audio",
        ),
        ([{"role": "user", "content": [{"type": "image", "data": b"x"}]}], r"content\[0\]: not an image"),
        (
            [{"role": "user", "content": [{"type": "video", "data": b"x"}]}],
            r"content\[0\]: not a video of a known kind",
        ),
        ([{"role": "user", "content": "long " * 300}], "maximum"),
        ([{"role": "user", "content": "a" * 20_000}], "maximum"),
    ],
)
def test_bad_input_is_the_clients_to_fix(engine: ArVllmEngine, messages: list[dict[str, Any]], says: str) -> None:
    import re

    submit(engine, "bad", messages)
    (failed,) = [o for o in collect(engine, 1) if isinstance(o, Failed)]
    assert failed.code == "InvalidRequest"
    assert re.search(says, failed.message)
