"""What is asked: mix, lengths, media; and that a command line that makes no sense is refused."""

from __future__ import annotations

import io
import random
import wave
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from benchmarks._arrivals import Arrival
from benchmarks._workload import BadMix, Workload, gradient_png, padded, parse_mix, tone_wav
from benchmarks.serving import parse, plan_arrivals


def test_a_mix_is_shares() -> None:
    assert parse_mix("text-to-text=3,text-to-speech=1") == {"text-to-text": 0.75, "text-to-speech": 0.25}
    assert parse_mix("image-to-text") == {"image-to-text": 1.0}


@pytest.mark.parametrize(
    "text", ["", "song", "text-to-text=0", "text-to-text=-1", "text-to-text=many", "text-to-text=nan"]
)
def test_a_bad_mix_says_what_is_wrong(text: str) -> None:
    with pytest.raises(BadMix, match="mix:"):
        parse_mix(text)


def test_the_seed_decides_and_the_mix_is_kept() -> None:
    workload = Workload(parse_mix("text-to-text=3,text-to-speech=1"))
    arrivals = [Arrival(0.0)] * 2000
    first = list(workload.requests(arrivals, seed=1))
    assert first == list(workload.requests(arrivals, seed=1))
    assert Counter(r.kind for r in first)["text-to-speech"] == pytest.approx(500, rel=0.15)
    for request in first:
        assert ("modalities" in request.body) == (request.kind == "text-to-speech")


def test_a_trace_decides_lengths_up_to_the_limits() -> None:
    workload = Workload({"text-to-text": 1.0}, max_tokens=100, max_input_tokens=500)
    arrivals = [Arrival(0.0, 200, 7), Arrival(0.0, 9000, 9000), Arrival(0.0, 0, None)]
    short, long, bare = workload.requests(arrivals, seed=0)
    assert [r.body["max_tokens"] for r in (short, long, bare)] == [7, 100, 100]
    lengths = [len(r.body["messages"][0]["content"].split()) for r in (short, long, bare)]
    assert lengths[0] * 2 == pytest.approx(200, rel=0.25), "a digit and a space are about two tokens"
    assert lengths[1] * 2 == pytest.approx(500, rel=0.25)


def test_padding_differs_from_request_to_request() -> None:
    numbers = random.Random(0)
    assert padded("Why?", 100, numbers) != padded("Why?", 100, numbers)
    assert padded("Why?", 1, numbers) == "Why?"


def test_media_are_real() -> None:
    with wave.open(io.BytesIO(tone_wav())) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (16_000, 16_000, 1)
    with Image.open(io.BytesIO(gradient_png(8))) as image:
        assert (image.size, image.mode) == ((8, 8), "RGB")
        assert image.getpixel((7, 0)) == (252, 0, 128)


def test_arrivals_of_a_command_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(f'{{"timestamp": {1000 * i}, "input_length": {i}}}\n' for i in range(11)))
    options, _ = parse(["--trace", str(trace), "--trace-start", "2", "--seconds", "3"])
    assert [a.input_tokens for a in plan_arrivals(options)] == [2, 3, 4]
    options, _ = parse(["--trace", str(trace), "--rate", "10", "--seconds", "100"])
    assert plan_arrivals(options)[-1].at_s == pytest.approx(1.0)
    options, _ = parse(["--rate", "20", "--seconds", "10"])
    assert len(plan_arrivals(options)) == pytest.approx(200, rel=0.3)


def test_without_any_load_there_is_a_small_closed_loop() -> None:
    options, workload = parse([])
    assert (options.concurrency, options.rate, options.trace) == (4, None, None)
    assert workload.mix == {"text-to-speech": 1.0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "2", "--rate", "1"], "use one of them"),
        (["--concurrency", "0"], "not above 0"),
        (["--rate", "nan"], "not above 0"),
        (["--mix", "song"], "no kind of request"),
        (["--prompts", "/nowhere/prompts"], "No such file"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert says in capsys.readouterr().err
