"""Exactness under load: whatever else is in the batch, in whichever replica, under whatever pressure on the KV cache.

Text, audio, image and video prompts, text-only and spoken, cut off at different lengths, 1 to 16 in flight, against what
transformers gives for each alone (R22, R25, R26, R27).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.exactness import KINDS, PROMPTS, TALKER_TOKENS, Prompt, Question, Row, compare_questions
from tests.e2e.local_run import ROOT, LocalRun
from tests.unit.stages.qwen3_reference import Reference, tiny_model_path

pytestmark = [pytest.mark.timeout(1500), pytest.mark.engine]

IN_FLIGHT = (1, 4, 8, 16)
# Room for one prompt of the greatest length, or about six as they are asked here, in small blocks: with 16 in flight every
# block is some prompt's, and whoever writes on takes one from another request, which is computed again.
LITTLE_KV_CACHE = {"kv_cache_memory_bytes": "1179648", "block_size": "32"}


def mixed_questions(count: int, seed: int) -> list[Question]:
    """Neighbours differ in kind, output and length; the same seed gives the same questions."""
    rng = random.Random(seed)
    questions = []
    for n in range(count):
        limit = rng.choice((TALKER_TOKENS, TALKER_TOKENS, rng.randint(1, TALKER_TOKENS)))
        prompt = Prompt(rng.randrange(PROMPTS))
        questions.append(Question(prompt, audio=n % 4 != 3, talker_tokens=limit, streamed=n % 2 == 1))
    return questions


def tiny_pipeline(folder: Path, *, thinker: dict[str, str] | None = None, mode: str | None = None) -> Path:
    """The example with other engine arguments of the thinker, or another transfer mode on both edges."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "qwen3-omni-tiny.pipeline.yaml").read_text())
    spec = document["spec"]
    for stage in spec["stages"]:
        stage["maxConcurrency"] = 16
        stage.pop("podGroup", None)
        if stage["name"] == "thinker":
            arguments = {a["name"]: a["value"] for a in stage["engineArgs"]} | (thinker or {})
            stage["engineArgs"] = [{"name": n, "value": v} for n, v in arguments.items()]
    for edge in spec["edges"]:
        edge["connector"] = {"type": "Auto"}
        if mode is not None:
            edge["mode"] = mode
            edge.pop("chunk", None)
    file = folder / "tiny.pipeline.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def asked_under_load(url: str, reference: Reference, count: int) -> list[Row]:
    """`count` questions at each number in flight."""
    rows = []
    for concurrency in IN_FLIGHT:
        questions = mixed_questions(count, seed=concurrency)
        rows += compare_questions(url, reference, questions, concurrency=concurrency)
    return rows


def assert_exact(rows: list[Row], count: int) -> None:
    assert len(rows) == count * len(IN_FLIGHT), "an answer for every question"
    assert [str(r) for r in rows if not r.exact] == []
    assert {r.question.prompt.kind for r in rows} == set(KINDS)
    assert any(not r.question.audio for r in rows)
    assert sum(r.frames for r in rows) > 3 * len(rows), "speech, not silence"


def assert_under_pressure(run: LocalRun) -> None:
    """Otherwise the answers say nothing about what they are asked for."""
    assert run.metric("thinker", "vllm:num_preemptions_total")[0] > 0, "nothing was computed again"
    served = run.metric("talker", "omni:stage_requests_total")
    assert len(served) == 3 and all(served), f"requests of each talker: {served}"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model_path())


@pytest.fixture(scope="module")
def three_talkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    folder = tmp_path_factory.mktemp("tiny")
    with LocalRun(folder, tiny_pipeline(folder, thinker=LITTLE_KV_CACHE), "--replicas", "talker=3") as run:
        yield run


def test_three_talkers_and_little_kv_cache(three_talkers: LocalRun, reference: Reference) -> None:
    assert_exact(asked_under_load(three_talkers.url, reference, 9), 9)
    assert_under_pressure(three_talkers)


@pytest.mark.long
def test_three_talkers_two_hundred_requests(three_talkers: LocalRun, reference: Reference) -> None:
    assert_exact(asked_under_load(three_talkers.url, reference, 50), 50)
    assert_under_pressure(three_talkers)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["asyncChunk", "fullPayload"])
def test_one_talker_two_hundred_requests(mode: str, tmp_path: Path, reference: Reference) -> None:
    """Both modes against the same reference: so they give the same audio as each other."""
    with LocalRun(tmp_path, tiny_pipeline(tmp_path, mode=mode)) as run:
        assert_exact(asked_under_load(run.url, reference, 50), 50)
