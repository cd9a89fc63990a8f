"""The talker engine against transformers' layers run one request after the other, on the tiny Qwen3-Omni.

    python -m benchmarks.talker [--requests 32] [--frames 60] [--threads 1] [--rounds 3] [--json FILE]

The serial loop is the tightest that transformers' modules allow: key/value cache, greedy, no `generate` around it, and
no request waits for another. Every request makes the same number of frames; at the engine one more arrives every other
step, until `c` are in flight. Rounds alternate between the loop and the engine, so that a busy machine slows both.

Figures: serial_frames_per_s, frames_per_s_c1, _c4, _c8, _c16 (requests in flight), speedup_c1 ... speedup_c16 (medians
over the rounds), codes_equal (1 if every code of every run equals the serial loop's).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import DynamicCache

from benchmarks._report import machine, report
from omni_runtime.deploy.load import LOCAL_PROFILE, load_pipeline, local_profiles
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.resolve import resolve
from omni_runtime.models import catalogue
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import CodesOut, Done, StageRequest
from omni_runtime.stages.qwen3_omni.conditioning import Conditioning, TalkerFrontend
from omni_runtime.stages.qwen3_omni.loading import load_parts
from omni_runtime.stages.qwen3_omni.talker import DEFAULT_SPEAKER, Qwen3OmniTalkerEngine

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "qwen3-omni-tiny.pipeline.yaml"
MODEL = "qwen3-omni-tiny"
STAGE, EDGE_IN, EDGE_OUT = "talker", "thinker->talker", "talker->code2wav"
IN_FLIGHT = (1, 4, 8, 16)
SUPPRESSED_TAIL, PENALTY = 1024, 1.05


def conditioning(config: Any, request: int) -> list[Payload]:
    """What a thinker would send: a chat prompt with seeded rows, and a dozen rows of answer."""
    rng = np.random.default_rng(request)
    start, end, newline = config.im_start_token_id, config.im_end_token_id, 10
    words = [int(v) for v in rng.integers(0, 250, 8 + request % 9)]
    prompt = [start, config.user_token_id, *words, end, newline, start, config.assistant_token_id, newline]
    rows = len(prompt) + 12
    ids = np.asarray([*prompt, *rng.integers(0, 250, 12)], dtype=np.int64)
    width = config.talker_config.thinker_hidden_size
    embed, hidden = (rng.standard_normal((rows, width), dtype=np.float32) for _ in range(2))
    tensors = {"token_ids": ids, "embed": embed, "hidden": hidden}
    meta: dict[str, object] = {"prompt_tokens": len(prompt)}
    return [Payload(start=0, rows=rows, finished=True, tensors=tensors, meta=meta)]


class Serial:
    """transformers' talker and code predictor, one request at a time."""

    def __init__(self, path: str) -> None:
        model = load_parts(path, revision=None, dtype=torch.float32, talker=True, code2wav=False)
        self._talker = model.talker
        self._frontend = TalkerFrontend(model, torch.device("cpu"))
        self._config = model.config.talker_config
        vocabulary = self._config.text_config.vocab_size
        self._suppressed = torch.zeros(vocabulary, dtype=torch.bool)
        self._suppressed[vocabulary - SUPPRESSED_TAIL :] = True

    @torch.inference_mode()
    def speak(self, payloads: list[Payload], frames: int) -> list[list[int]]:
        rows = Conditioning(self._frontend, self._frontend.speakers[DEFAULT_SPEAKER])
        for payload in payloads:
            rows.feed(payload)
        prefill = rows.prefill()
        assert prefill is not None
        inputs, positions = prefill.embeds[None], prefill.positions[:, None]
        cache = DynamicCache(config=self._config.text_config)
        seen = torch.zeros_like(self._suppressed)
        codes: list[list[int]] = []
        while True:
            output = self._talker.model(
                inputs_embeds=inputs, position_ids=positions, past_key_values=cache, use_cache=True
            )
            hidden = output.last_hidden_state[0, -1]
            logits = self._talker.codec_head(hidden).float()
            logits = torch.where(seen, torch.where(logits < 0, logits * PENALTY, logits / PENALTY), logits)
            first = int(logits.masked_fill(self._suppressed, float("-inf")).argmax())
            seen[first] = True
            frame, total = self._residuals(hidden, first)
            codes.append(frame)
            if len(codes) == frames:
                return codes
            text = rows.text_row(len(codes) - 1)
            assert text is not None
            inputs = (total + text)[None, None]
            positions = positions[..., -1:] + 1

    def _residuals(self, hidden: torch.Tensor, first: int) -> tuple[list[int], torch.Tensor]:
        predictor = self._talker.code_predictor
        embedded = self._talker.get_input_embeddings()(torch.tensor([first]))
        sequence = torch.cat([hidden[None], embedded])
        codes = [first]
        for group, (head, table) in enumerate(zip(predictor.lm_head, predictor.get_input_embeddings(), strict=True)):
            last = predictor.model(inputs_embeds=sequence[None], use_cache=False).last_hidden_state[0, -1]
            codes.append(int(head(last).argmax()))
            sequence = torch.cat([sequence, table(torch.tensor([codes[group + 1]]))])
        return codes, sequence[1:].sum(dim=0)


def an_engine(plan: ResolvedPlan, path: str, slots: int, threads: int) -> Qwen3OmniTalkerEngine:
    stage = msgspec.structs.replace(
        plan.stage(STAGE),
        max_concurrency=slots,
        engine_args=(
            ("dtype", "float32"),
            ("max_frames", "512"),
            ("max_prefill_rows", "256"),
            ("threads", str(threads)),
        ),
    )
    engine = Qwen3OmniTalkerEngine(EngineContext(plan=plan, stage=stage, model_path=path))
    engine.load()
    return engine


def batched(engine: Qwen3OmniTalkerEngine, inputs: list[list[Payload]], frames: int) -> dict[str, list[list[int]]]:
    codes: dict[str, list[list[int]]] = {str(k): [] for k in range(len(inputs))}
    params = {"talker_temperature": 0.0, "talker_max_tokens": frames + 1, "ignore_eos": True}
    capacity = engine.stats().capacity
    waiting = list(enumerate(inputs))
    running = step = 0
    while running or waiting:
        if waiting and running < capacity and step % 2 == 0:
            name, payloads = waiting.pop(0)
            engine.submit(StageRequest(str(name), params, {}, (EDGE_IN,), (EDGE_OUT,), emit_codes=True))
            for payload in payloads:
                engine.feed(str(name), EDGE_IN, payload)
            running += 1
        for output in engine.poll(0.0):
            if isinstance(output, CodesOut):
                codes[output.request].extend(list(frame) for frame in output.codes)
            elif isinstance(output, Done):
                running -= 1
        step += 1
    return codes


def measure(requests: int, frames: int, threads: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    path = str(catalogue.prepare(MODEL, catalogue.default_models_dir(), lambda _: None))
    plan = resolve(load_pipeline(EXAMPLE), local_profiles(), target="local", default_profile=LOCAL_PROFILE)
    serial = Serial(path)
    engines = {c: an_engine(plan, path, c, threads) for c in IN_FLIGHT}
    config = load_parts(path, revision=None, dtype=torch.float32, talker=True, code2wav=False).config
    inputs = [conditioning(config, k) for k in range(requests)]
    expected = {str(k): serial.speak(payloads, frames) for k, payloads in enumerate(inputs)}
    equal = True
    rates: dict[int, list[float]] = {0: [], **{c: [] for c in IN_FLIGHT}}
    for turn in range(rounds):
        start = time.perf_counter()
        few = inputs[: max(1, requests // 4)]
        for payloads in few:
            serial.speak(payloads, frames)
        rates[0].append(len(few) * frames / (time.perf_counter() - start))
        for c, engine in engines.items():
            chosen = inputs if c >= 8 else inputs[: max(c, requests // 4)]
            start = time.perf_counter()
            codes = batched(engine, chosen, frames)
            rates[c].append(len(chosen) * frames / (time.perf_counter() - start))
            equal = equal and all(codes[str(k)] == expected[str(k)] for k in range(len(chosen)))
        print(
            f"round {turn + 1}: " + ", ".join(f"{c or 'serial'}: {r[-1]:.0f}/s" for c, r in rates.items()), flush=True
        )
    figures = {"serial_frames_per_s": statistics.median(rates[0])}
    figures |= {f"frames_per_s_c{c}": statistics.median(rates[c]) for c in IN_FLIGHT}
    for c in IN_FLIGHT:
        figures[f"speedup_c{c}"] = statistics.median(r / s for r, s in zip(rates[c], rates[0], strict=True))
    return {**figures, "codes_equal": float(equal)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.talker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the loop and for the engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    described = machine()
    figures = measure(options.requests, options.frames, options.threads, options.rounds)
    report("talker", described, figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
