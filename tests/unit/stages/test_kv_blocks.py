"""vLLM's blocks as stores, on an engine core that is made up: what is refused, and tables of larger blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_runtime.errors import EngineError
from omni_runtime.kv.layout import KvLayout, Span
from omni_runtime.stages.ar_vllm import kv_blocks
from omni_runtime.stages.ar_vllm.kv_blocks import VllmKvCache

pytestmark = pytest.mark.engine

HEADS, SIZE, DIM = 2, 4, 8


@pytest.fixture(autouse=True)
def plain_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    where = np.arange(SIZE * DIM).reshape(SIZE, DIM)
    monkeypatch.setattr(kv_blocks, "learn_places", lambda *_: (where, where))


def a_core(
    *caches: torch.Tensor, table: tuple[int, ...] = (), block_size: int = SIZE, groups: int = 1, world: int = 1
) -> Any:
    layers = {
        f"layer{n}": SimpleNamespace(kv_cache=cache, num_kv_heads=HEADS, head_size=DIM, isa="vec")
        for n, cache in enumerate(caches)
    }
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(layers))] * groups),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=world),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        ),
    )
    manager = SimpleNamespace(get_block_ids=lambda request: (list(table),))
    return SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
        scheduler=SimpleNamespace(block_size=block_size, kv_cache_manager=manager),
    )


def a_cache(blocks: int = 6, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(blocks, HEADS, SIZE, 2 * DIM).to(dtype)


@pytest.mark.parametrize(
    ("core", "says"),
    [
        (lambda: a_core(a_cache(), world=2), "shared out over several processes"),
        (lambda: a_core(a_cache(), groups=2), "2 groups of layers have block tables of their own"),
        (lambda: a_core(a_cache().to("meta")), "layer0 has torch.bfloat16 on meta"),
        (lambda: a_core(a_cache().to(torch.float8_e4m3fn)), "layer0 has torch.float8_e4m3fn on cpu"),
        (lambda: a_core(a_cache(), a_cache(dtype=torch.float32)), "layer1 has torch.float32 on cpu"),
        (
            lambda: a_core(a_cache(), a_cache(blocks=5)),
            r"layer1 has \[5, 2, 4, 16\], not \[blocks, 2, tokens, 2 \* 8\]",
        ),
        (lambda: a_core(a_cache()[..., 0]), r"layer0 has \[6, 2, 4\], not"),
        (lambda: a_core(a_cache().transpose(2, 3).contiguous().transpose(2, 3)), "must be together"),
        (lambda: a_core(a_cache(), block_size=6), "6 tokens in a table's block, 4 in a tensor's"),
        (lambda: a_core(a_cache(), block_size=2), "2 tokens in a table's block, 4 in a tensor's"),
    ],
)
def test_caches_that_cannot_be_read(core: Any, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        VllmKvCache(core(), "m")


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
def test_a_block_of_the_table_is_several_of_the_tensor(dtype: torch.dtype, name: str) -> None:
    caches = [a_cache(dtype=dtype), a_cache(dtype=dtype)]
    cache = VllmKvCache(a_core(*caches, table=(2, 0), block_size=2 * SIZE), "m")
    assert cache.layout == KvLayout("m", 2, HEADS, DIM, name)
    assert cache.table("r") == (4, 5, 0, 1)
    whole = Span(range(2), range(HEADS), range(4 * SIZE))
    out = np.empty(whole.shape(cache.layout), cache.layout.carrier)
    cache.store("r").read(whole, out)
    for n, tensor in enumerate(caches):
        blocks = tensor[[4, 5, 0, 1]].view(4, HEADS, 2, SIZE, DIM)  # a block's keys before its values
        want = blocks.permute(2, 0, 3, 1, 4).reshape(2, 4 * SIZE, HEADS, DIM)
        assert np.array_equal(out[n], (want.view(torch.uint16) if name == "bfloat16" else want).numpy())
    cache.store("r").write(whole, np.zeros_like(out))
    assert not any(tensor[[4, 5, 0, 1]].any() for tensor in caches)
    assert all(tensor[[2, 3]].all() for tensor in caches), "blocks of others"
