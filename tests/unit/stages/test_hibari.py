"""smol_omni's voice: streamed PCM equals one-shot synthesis; same seed, same audio (R20, R22, R27)."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from omni_runtime.errors import InvalidRequest
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.engine import AudioOut, Done, EdgeOut, Failed, StageEngine, StageOutput, StageRequest, Started
from tests.unit.stages.plans import TALKER_EDGE, THINKER_EDGE, a_context, a_plan

hibari = pytest.importorskip("hibari")

from omni_runtime.stages.hibari.acoustic import SPECTRA, HibariAcousticEngine, PhraseFrames  # noqa: E402
from omni_runtime.stages.hibari.synthesis import Noise, PhraseSynthesis  # noqa: E402
from omni_runtime.stages.hibari.text import speakable  # noqa: E402
from omni_runtime.stages.hibari.vocoder import HibariVocoderEngine  # noqa: E402

TEXT = "The operator watches the cluster."


@pytest.fixture(scope="module")
def acoustic() -> HibariAcousticEngine:
    engine = HibariAcousticEngine(a_context(a_plan(chunk=(8, 24, 0)), "talker"))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def vocoder() -> HibariVocoderEngine:
    engine = HibariVocoderEngine(a_context(a_plan(), "code2wav"))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def phrase(acoustic: HibariAcousticEngine) -> PhraseFrames:
    (phonemes,) = acoustic._net.phonemize(TEXT)
    frames = acoustic.run(phonemes)
    assert frames is not None
    return frames


class SameNoise:
    """Stands in for the generator of the one-shot synthesis: the noise of `Noise(seed)`, in its layout."""

    def __init__(self, seed: int, frames: int) -> None:
        self._noise = Noise(seed).frames(frames, 601)

    def standard_normal(self, shape: tuple[int, int], dtype: type) -> np.ndarray:
        return np.ascontiguousarray(self._noise.T).view(np.float32)


@pytest.mark.parametrize("chunk", [1, 5, 24, 96, 10_000])
@pytest.mark.parametrize("frames", [1, 2, 3, 7, 60, None])
def test_streamed_equals_one_shot(phrase: PhraseFrames, chunk: int, frames: int | None) -> None:
    total = frames or phrase.frames
    spectra = {n: phrase.spectra[n][:total] for n in SPECTRA}
    f0 = phrase.f0[:total]
    parts = [np.array(spectra[n].T, dtype=np.float32) for n in SPECTRA]
    expected = hibari.dsp.synth(*parts, f0.copy(), SameNoise(7, total))
    synthesis = PhraseSynthesis(Noise(7))
    pieces = [
        synthesis.push(
            {n: s[start : start + chunk] for n, s in spectra.items()},
            f0[start : start + chunk],
            last=start + chunk >= total,
        )
        for start in range(0, total, chunk)
    ]
    streamed = np.concatenate(pieces)
    assert streamed.shape == expected.shape == (total * 300,)
    assert np.abs(streamed - expected).max() <= 1e-5


def test_a_wrong_noise_is_noticed(phrase: PhraseFrames) -> None:
    parts = [np.array(phrase.spectra[n].T, dtype=np.float32) for n in SPECTRA]
    expected = hibari.dsp.synth(*parts, phrase.f0.copy(), SameNoise(8, phrase.frames))
    streamed = PhraseSynthesis(Noise(7)).push(phrase.spectra, phrase.f0, last=True)
    assert np.abs(streamed - expected).max() > 1e-5


def test_most_of_a_chunk_leaves_at_once(phrase: PhraseFrames) -> None:
    head = {n: s[:24] for n, s in phrase.spectra.items()}
    assert PhraseSynthesis(Noise(0)).push(head, phrase.f0[:24], last=False).size >= (24 - 5) * 300


def segment(text: str, start: int = 0, *, finished: bool = False) -> Payload:
    utf8 = np.frombuffer(text.encode(), np.uint8)
    return Payload(start=start, rows=len(utf8), finished=finished, tensors={"utf8": utf8} if text else {})


def drain(engine: StageEngine) -> list[StageOutput]:
    outputs: list[StageOutput] = []
    while more := engine.poll(0.0):
        outputs.extend(more)
    return outputs


def speak(acoustic: HibariAcousticEngine, *texts: str, request: str = "r") -> list[StageOutput]:
    acoustic.submit(StageRequest(request, {}, {}, (THINKER_EDGE,), (TALKER_EDGE,)))
    for text in texts:
        acoustic.feed(request, THINKER_EDGE, segment(text))
    acoustic.feed(request, THINKER_EDGE, segment("", finished=True))
    return drain(acoustic)


def decode(
    vocoder: HibariVocoderEngine, chunks: list[Payload], seed: int | None = None, request: str = "r"
) -> np.ndarray:
    vocoder.submit(StageRequest(request, {"seed": seed}, {}, (TALKER_EDGE,), ()))
    for chunk in chunks:
        vocoder.feed(request, TALKER_EDGE, chunk)
    outputs = drain(vocoder)
    assert isinstance(outputs[-1], Done)
    return np.concatenate([np.frombuffer(o.pcm, "<f4") for o in outputs if isinstance(o, AudioOut)] or [np.zeros(0)])


def test_acoustic_positions_are_gapless_and_the_end_is_marked_r6(acoustic: HibariAcousticEngine) -> None:
    outputs = speak(acoustic, "One sentence.", "And another one, a bit longer.")
    assert isinstance(outputs[0], Started)
    payloads = [o.payload for o in outputs if isinstance(o, EdgeOut)]
    assert payloads[0].rows == 8, "the first chunk is the initial one"
    assert [p.start for p in payloads] == list(np.cumsum([0] + [p.rows for p in payloads[:-1]]))
    assert [p.finished for p in payloads] == [False] * (len(payloads) - 1) + [True]
    assert isinstance(outputs[-1], Done)
    assert outputs[-1].frames == sum(p.rows for p in payloads) > 100


def test_pcm_is_complete_and_depends_on_the_seed_alone_r27(
    acoustic: HibariAcousticEngine, vocoder: HibariVocoderEngine
) -> None:
    chunks = [o.payload for o in speak(acoustic, TEXT) if isinstance(o, EdgeOut)]
    alone = decode(vocoder, chunks)
    assert alone.size == 300 * sum(c.rows for c in chunks)
    assert np.abs(alone).max() > 0.05, "speech, not silence"
    assert np.array_equal(alone, decode(vocoder, chunks))
    assert not np.array_equal(alone, decode(vocoder, chunks, seed=5))
    for name in ("a", "b"):
        vocoder.submit(StageRequest(name, {}, {}, (TALKER_EDGE,), ()))
    for chunk in chunks:
        vocoder.feed("a", TALKER_EDGE, chunk)
        vocoder.feed("b", TALKER_EDGE, chunk)
    together = [o for o in drain(vocoder) if isinstance(o, AudioOut)]
    for name in ("a", "b"):
        assert np.array_equal(
            np.concatenate([np.frombuffer(o.pcm, "<f4") for o in together if o.request == name]), alone
        )


@pytest.mark.parametrize(
    ("chunk", "sizing"), [((1, 1, 0), "fixed"), ((5, 40, 0), "ramp"), ((8, 24, 0), "adaptive"), ((96, 96, 0), "fixed")]
)
def test_full_payload_and_every_chunking_give_the_same_audio(
    acoustic: HibariAcousticEngine, vocoder: HibariVocoderEngine, chunk: tuple[int, int, int], sizing: str
) -> None:
    plan = a_plan(chunk=chunk)
    edge = plan.edges[1]
    texts = ("A first sentence, said slowly.", "A second one.")
    audio = {}
    for name, mode in (("chunked", "asyncChunk"), ("whole", "fullPayload")):
        engine = HibariAcousticEngine(
            a_context(replace(plan, edges=(plan.edges[0], replace(edge, sizing=sizing, mode=mode))), "talker")
        )
        engine._net = acoustic._net
        engine.submit(StageRequest("r", {}, {}, (THINKER_EDGE,), (TALKER_EDGE,)))
        engine.feed("r", THINKER_EDGE, segment(texts[0]))
        early = [o for o in drain(engine) if isinstance(o, EdgeOut)]
        assert bool(early) is (name == "chunked"), "a whole payload waits for the end"
        engine.taken("r", TALKER_EDGE, 2)
        engine.feed("r", THINKER_EDGE, segment(texts[1], finished=True))
        late = [o for o in drain(engine) if isinstance(o, EdgeOut)]
        audio[name] = decode(vocoder, [o.payload for o in early + late], request=name)
    assert audio["chunked"].shape == audio["whole"].shape
    assert np.abs(audio["chunked"] - audio["whole"]).max() <= 1e-5
    assert np.abs(audio["whole"]).max() > 0.05


def test_an_answer_without_a_sound_ends_well(acoustic: HibariAcousticEngine, vocoder: HibariVocoderEngine) -> None:
    chunks = [o.payload for o in speak(acoustic) if isinstance(o, EdgeOut)]
    assert [(c.rows, c.finished) for c in chunks] == [(0, True)]
    assert decode(vocoder, chunks).size == 0


READABLE = [
    "It takes 10⁻⁴ s.",
    "From -❻ to -➂ and ፰స.",
    "It is " + "9" * 40 + ".",
    "$1" + ",000" * 13,
    "𝟙𝟚𝟛" * 13,
    "४" * 40,
    "\ud7ff\uffff\0",
]


@pytest.mark.parametrize("text", READABLE, ids=ascii)
def test_any_digits_can_be_read(acoustic: HibariAcousticEngine, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: one such number ended the process, and with it every answer that was being spoken."""
    monkeypatch.setattr(acoustic, "run", lambda phonemes, speed: None)  # the net takes seconds, and has no part in it
    assert isinstance(speak(acoustic, text)[-1], Done)


def test_long_numbers_are_read_digit_by_digit_and_short_ones_are_left_alone(acoustic: HibariAcousticEngine) -> None:
    assert acoustic._phrases("x²") == list(acoustic._net.phonemize("x squared")), "what can be read is left alone"
    assert speakable("1,000,000 and x⁴, in 2024") == "1,000,000 and x4, in 2024"
    assert speakable("1" * 30) == " ".join("1" * 30)


def test_a_phrase_that_cannot_be_read_fails_its_request_alone(
    acoustic: HibariAcousticEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    phonemize = acoustic._net.phonemize

    def refuse(text: str) -> list[str]:
        if "unreadable" in text:
            raise IndexError("list index out of range")
        return list(phonemize(text))

    monkeypatch.setattr(acoustic._net, "phonemize", refuse, raising=False)
    acoustic.submit(StageRequest("a", {}, {}, (THINKER_EDGE,), (TALKER_EDGE,)))
    acoustic.feed("a", THINKER_EDGE, segment("Something unreadable.", finished=True))
    outputs = speak(acoustic, TEXT, request="b")
    failures = [o for o in outputs if isinstance(o, Failed)]
    assert [(f.request, f.code) for f in failures] == [("a", "EngineError")]
    assert "Something unreadable." in failures[0].message
    assert isinstance(outputs[-1], Done)
    assert outputs[-1].request == "b"
    assert acoustic.stats().running == acoustic.stats().waiting == 0


def test_only_the_loaded_voice_speaks_r58(acoustic: HibariAcousticEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"audio\.voice.*heart"):
        acoustic.submit(StageRequest("v", {"voice": "../../etc/passwd"}))


def test_abort_leaves_nothing(acoustic: HibariAcousticEngine) -> None:
    acoustic.submit(StageRequest("x", {}, {}, (THINKER_EDGE,), (TALKER_EDGE,)))
    acoustic.feed("x", THINKER_EDGE, segment(TEXT))
    acoustic.abort("x")
    acoustic.feed("x", THINKER_EDGE, segment(TEXT))
    assert drain(acoustic) == []
    assert acoustic.stats().running == acoustic.stats().waiting == 0
