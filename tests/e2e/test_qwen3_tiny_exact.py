"""qwen3-omni-tiny through real pods: text ids and codec codes equal to transformers' generate, PCM to one-shot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_runtime.cli.kubectl import Kube, port_forward, wait_ready
from tests.e2e.conftest import fresh_namespace
from tests.e2e.exactness import KINDS, PROMPTS, Prompt, Row, compare
from tests.unit.stages.qwen3_reference import Reference, tiny_model_path

pytestmark = [pytest.mark.timeout(1200), pytest.mark.engine]

PIPELINE = "qwen3-omni-tiny"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model_path())


@pytest.fixture(scope="module")
def url(kube: Kube) -> Iterator[str]:
    with fresh_namespace(kube) as namespace:
        kube.read("-n", namespace, "apply", "-f", f"examples/{PIPELINE}.pipeline.yaml")
        wait_ready(lambda: kube.get("-n", namespace, "omnipipeline", PIPELINE), 600)
        with port_forward(kube, namespace, PIPELINE) as address:
            yield address


@pytest.fixture(scope="module")
def rows(url: str, reference: Reference) -> list[Row]:
    return compare(url, reference)


def test_every_prompt_is_exact(rows: list[Row]) -> None:
    assert len(rows) == PROMPTS >= 24
    assert [str(r) for r in rows if not r.exact] == []
    assert {r.question.prompt.kind for r in rows} == set(KINDS)
    assert sum(r.frames for r in rows) > 100, "speech, not silence"


def test_a_shift_of_one_row_is_noticed(url: str, reference: Reference) -> None:
    """Negative control: against conditioning rows that are one row late, the same pipeline is not exact."""
    shifted = compare(url, reference, count=6, shift=1)
    assert all(r.text_equal for r in shifted)
    assert not any(r.codes_equal for r in shifted if r.frames > 1)
    assert any(r.frames > 1 for r in shifted)


def test_prompts_are_different() -> None:
    assert len({repr(Prompt(n).openai_messages()) for n in range(PROMPTS)}) == PROMPTS
