"""vLLM's paged KV cache on CPUs as stores of `omni_runtime.kv`: read and written in place, by a request's own blocks.

For code that runs where vLLM's engine core does (`executor.InCoreExecutor`): blocks are memory of that process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from omni_runtime.errors import EngineError
from omni_runtime.kv.layout import KvLayout
from omni_runtime.kv.stores import PackedPlane, PagedStore, Plane, StridedPlane

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DIGIT = 128  # bfloat16 counts to 256 without a gap


class VllmKvCache:
    """The cache of one engine core in this process. model: as in KvLayout.

    Raises EngineError for a cache that this cannot read: on a device, quantized, shared out over processes, of
    several groups of layers (sliding windows, recurrent states), or laid out as this vLLM's CPU attention does not.
    """

    def __init__(self, core: Any, model: str) -> None:
        runner = core.model_executor.driver_worker.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        if runner.vllm_config.parallel_config.world_size != 1:
            raise EngineError("KV blocks: the cache is shared out over several processes")
        if len(groups) != 1:
            raise EngineError(
                f"KV blocks: {len(groups)} groups of layers have block tables of their own; one is needed"
            )
        context = runner.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in groups[0].layer_names]
        first = layers[0]
        heads, dim, dtype = int(first.num_kv_heads), int(first.head_size), first.kv_cache.dtype
        for name, layer in zip(groups[0].layer_names, layers, strict=True):
            shape = tuple(layer.kv_cache.shape)
            if layer.kv_cache.device.type != "cpu" or dtype not in _NAMES or layer.kv_cache.dtype != dtype:
                raise EngineError(f"KV blocks: {name} has {layer.kv_cache.dtype} on {layer.kv_cache.device}")
            if len(shape) != 4 or shape != (first.kv_cache.shape[0], heads, first.kv_cache.shape[2], 2 * dim):
                raise EngineError(f"KV blocks: {name} has {list(shape)}, not [blocks, {heads}, tokens, 2 * {dim}]")
        size = int(first.kv_cache.shape[2])
        places = learn_places(first.isa, dtype, size, dim)
        self.layout = KvLayout(model, len(layers), heads, dim, _NAMES[dtype])
        self._planes = [planes_of(layer.kv_cache, places, self.layout) for layer in layers]
        self._manager = core.scheduler.kv_cache_manager
        self._parts, rest = divmod(
            int(core.scheduler.block_size), size
        )  # a block of the table is several of the tensor
        if rest or not self._parts:
            raise EngineError(f"KV blocks: {core.scheduler.block_size} tokens in a table's block, {size} in a tensor's")

    def table(self, request: str) -> tuple[int, ...]:
        """Blocks of a request (by vLLM's own id for it), in the order of its tokens, as they are now."""
        (blocks,) = self._manager.get_block_ids(request)
        return tuple(block * self._parts + part for block in blocks for part in range(self._parts))

    def store(self, request: str) -> PagedStore:
        return PagedStore(self.layout, self._planes, self.table(request))


def planes_of(cache: torch.Tensor, places: tuple[np.ndarray, np.ndarray], layout: KvLayout) -> list[Plane]:
    """Keys and values of one layer. cache: [blocks, heads, tokens, 2 * head_dim], a block's keys before its values."""
    array = cache.view(torch.uint16).numpy() if cache.dtype is torch.bfloat16 else cache.numpy()
    blocks, heads, size, twice = array.shape
    cells = array.reshape(blocks, heads, 2, size * twice // 2)
    if not np.shares_memory(cells, array):
        raise EngineError(f"KV blocks: strides {cache.stride()}; the tokens of a block and head must be together")
    return [_plane(cells[:, :, n], where, layout) for n, where in enumerate(places)]


def _plane(cells: np.ndarray, where: np.ndarray, layout: KvLayout) -> Plane:
    size, dim = where.shape
    by_token, by_dim = int(where[1, 0]) if size > 1 else 0, int(where[0, 1]) if dim > 1 else 0
    if not np.array_equal(where, np.add.outer(np.arange(size) * by_token, np.arange(dim) * by_dim)):
        return PackedPlane(cells, where)
    of_block, of_head, of_cell = cells.strides
    shape = (cells.shape[0], size, cells.shape[1], dim)
    strides = (of_block, by_token * of_cell, of_head, by_dim * of_cell)
    return StridedPlane(np.lib.stride_tricks.as_strided(cells, shape, strides))


def learn_places(isa: str, dtype: torch.dtype, size: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Which cell of a block holds which value, for keys and for values: [tokens, head_dim] of cells.

    Asked of vLLM's own kernel, by a block of numbered values: each instruction set has an order of its own (column-major
    keys, tiles), and it is written down nowhere else.
    """
    from vllm import _custom_ops as ops

    count = size * dim
    numbers = np.arange(count)
    found = [np.zeros(count, np.int64), np.zeros(count, np.int64)]
    for power in range(4):
        digit = torch.from_numpy(numbers // _DIGIT**power % _DIGIT).to(dtype).reshape(size, 1, dim)
        block = torch.full((1, 1, 2 * size, dim), -1, dtype=dtype)
        keys, values = block.chunk(2, dim=2)
        slots = torch.arange(size, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(digit, digit, keys, values, slots, isa, 1.0, 1.0, "auto")
        for sum_, plane in zip(found, (keys, values), strict=True):
            sum_ += plane.reshape(-1).to(torch.int64).numpy() * _DIGIT**power
    places = []
    for sum_ in found:
        if not np.array_equal(np.sort(sum_), numbers):
            raise EngineError(f"KV blocks: vLLM's {isa} kernel does not keep each value of a block in one place")
        where = np.empty(count, np.int64)
        where[sum_] = numbers
        places.append(where.reshape(size, dim))
    return places[0], places[1]
