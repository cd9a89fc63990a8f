"""A prompt's KV cache from one vLLM engine's blocks, over a connector, into another's: B goes on as A would have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.connectors.kit import EDGE, Pair, Site, a_pair, producer
from tests.unit.stages.qwen3_reference import tiny_model_path

pytest.importorskip("vllm")

import torch

from omni_runtime.kv.injection import KvInjector
from omni_runtime.kv.layout import KvLayout, Span
from omni_runtime.kv.stores import KvStore, PackedPlane, PagedStore, StridedPlane
from omni_runtime.kv.transfer import KvReceiver, KvSender
from omni_runtime.stages.ar_vllm.kv_blocks import VllmKvCache, learn_places, planes_of

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(300)]

PROMPT = [(7 * n) % 300 + 5 for n in range(150)]
TOKENS = 24


@dataclass(frozen=True, slots=True)
class Engine:
    llm: Any
    cache: VllmKvCache

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def submit(self, name: str) -> str:
        """vLLM's own id of the request."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": PROMPT}, params)
        (id,) = self.scheduler.requests
        return str(id)

    def step(self) -> list[int]:
        """One step of the engine: what its one request has generated so far."""
        return [t for output in self.llm.llm_engine.step() for t in output.outputs[0].token_ids]

    def computed(self, id: str) -> int:
        """Tokens of the prompt whose keys and values are there."""
        return min(len(PROMPT), int(self.scheduler.requests[id].num_computed_tokens))

    def go_on(self) -> list[int]:
        tokens: list[int] = []
        while self.llm.llm_engine.has_unfinished_requests():
            tokens = self.step() or tokens
        return tokens


def an_engine(dtype: str, block_size: int) -> Engine:
    from vllm import LLM

    llm = LLM(
        model=tiny_model_path(),
        dtype=dtype,
        block_size=block_size,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=96,  # the prompt is computed in two steps
        kv_cache_memory_bytes=4 << 20,
        enable_prefix_caching=False,
        async_scheduling=False,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"audio": 0, "image": 0, "video": 0},
        distributed_executor_backend="omni_runtime.stages.ar_vllm.executor.InCoreExecutor",
        skip_tokenizer_init=True,
    )
    return Engine(llm, VllmKvCache(llm.llm_engine.engine_core.engine_core, "tiny"))


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # two would wait for each other, spinning, on a machine that has other things to do
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(environment: None, request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """Blocks of 32 tokens and of 64. bfloat16 is in tiles where the CPU has AMX."""
    return an_engine(request.param, 32), an_engine(request.param, 64)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def prefill_and_send(a: Engine, pair: Pair) -> list[int]:
    """A computes the prompt and sends what each step adds; then it generates."""
    id = a.submit("a")
    store = a.cache.store(id)
    sender = KvSender(pair.up, "r", EDGE, store, chunk_bytes=20_000)
    steps = 0
    tokens: list[int] = []
    while a.computed(id) < len(PROMPT):
        tokens = a.step()
        steps += 1
        store.update(a.cache.table(id))
        await sender.advance(a.computed(id))
    await sender.advance(len(PROMPT), last=True)
    assert steps > 1
    return a.go_on() or tokens


def prefill_and_zero(b: Engine) -> KvStore:
    """B has its request, and none of its keys and values."""
    id = b.submit("b")
    while b.computed(id) < len(PROMPT):
        b.step()
    store = b.cache.store(id)
    layout = b.cache.layout
    whole = Span(range(layout.layers), range(layout.heads), range(len(PROMPT)))
    store.write(whole, np.zeros(whole.shape(layout), layout.carrier))
    return store


@pytest.mark.parametrize("mode", ["same pod", "two pods"])
async def test_b_goes_on_as_a_would_have(engines: tuple[Engine, Engine], site: Site, mode: str) -> None:
    a, b = engines
    async with a_pair(site, mode) as pair, KvReceiver(pair.down) as receiver:
        injector = KvInjector(prefill_and_zero(b), "r", EDGE, stop=len(PROMPT))
        receiving = asyncio.create_task(receiver.receive(injector, producer(pair.up)))
        expected = await prefill_and_send(a, pair)
        async with asyncio.timeout(60):
            await receiving
        assert len(expected) == TOKENS
        assert b.go_on() == expected
        await pair.nothing_left()


def test_without_it_b_says_something_else(engines: tuple[Engine, Engine]) -> None:
    a, b = engines
    a.submit("alone")
    expected = a.go_on()
    store = prefill_and_zero(b)
    assert b.go_on() != expected
    assert store.capacity >= len(PROMPT)


@pytest.mark.parametrize(
    ("isa", "dtype", "size", "dim", "keys", "values"),
    [
        ("vec", torch.float32, 64, 32, StridedPlane, StridedPlane),
        ("vec16", torch.bfloat16, 16, 80, StridedPlane, StridedPlane),
        ("amx", torch.bfloat16, 64, 64, PackedPlane, PackedPlane),
    ],
)
def test_blocks_are_read_and_written_as_vllms_kernel_does(
    isa: str, dtype: torch.dtype, size: int, dim: int, keys: type, values: type
) -> None:
    from vllm import _custom_ops as ops

    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    heads, table, count = 3, (4, 1, 2), 2 * size + 7
    name = "float32" if dtype is torch.float32 else "bfloat16"
    layout = KvLayout("m", 1, heads, dim, name)
    places = learn_places(isa, dtype, size, dim)
    k, v = (torch.randn(count, heads, dim).to(dtype) for _ in range(2))
    slots = torch.tensor([table[t // size] * size + t % size for t in range(count)])
    cache = torch.zeros(6, heads, size, 2 * dim, dtype=dtype)
    ops.cpu_attn_reshape_and_cache(k, v, *cache.view(6, heads, 2 * size, dim).chunk(2, dim=2), slots, isa)
    planes = planes_of(cache, places, layout)
    assert [type(p) for p in planes] == [keys, values]
    whole = Span(range(1), range(heads), range(count))
    out = np.empty(whole.shape(layout), layout.carrier)
    PagedStore(layout, [planes], table).read(whole, out)
    want = torch.stack((k, v))[None]
    assert np.array_equal(out, (want.view(torch.uint16) if name == "bfloat16" else want).numpy())
    again = torch.zeros_like(cache)
    PagedStore(layout, [planes_of(again, places, layout)], table).write(whole, out)
    assert torch.equal(again, cache)
