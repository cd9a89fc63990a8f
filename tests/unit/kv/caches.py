"""Caches of random bits, and payloads made of them without a connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omni_runtime.connectors.api import Reservation
from omni_runtime.kv.layout import KvLayout
from omni_runtime.kv.stores import PackedPlane, PagedStore, StridedPlane
from omni_runtime.protocol.payload import Payload

LAYOUT = KvLayout("m", layers=3, heads=2, head_dim=4, dtype="bfloat16")
EDGE = "thinker->talker"


def some_bits(shape: tuple[int, ...], layout: KvLayout, seed: int = 0) -> np.ndarray:
    """Every pattern, NaNs and denormals among them."""
    nbytes = int(np.prod(shape)) * layout.carrier.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return raw.view(layout.carrier).reshape(shape)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


@dataclass(frozen=True, slots=True)
class Paged:
    """A cache of blocks with a request in it."""

    store: PagedStore
    cells: np.ndarray  # [layers, planes, blocks, tokens of a block, heads, dim], or [..., blocks, heads, values]
    table: tuple[int, ...]
    where: np.ndarray | None  # of the values: [tokens of a block, dim]

    def tokens(self, count: int) -> np.ndarray:
        """[layers, planes, tokens, heads, dim], without the code that is tested."""
        size = self.cells.shape[3] if self.where is None else len(self.where)
        at = [(self.table[t // size], t % size) for t in range(count)]
        blocks, inside = np.array(at, int).reshape(-1, 2).T
        if self.where is None:
            return self.cells[:, :, blocks, inside]
        values = [self.cells[:, :, b][..., self.where[t]] for b, t in at]
        return np.stack(values, axis=2) if at else self.cells[:, :, :0, :, : self.where.shape[1]]

    def others(self) -> np.ndarray:
        """Blocks that are not the request's."""
        rest = [b for b in range(self.cells.shape[2]) if b not in self.table]
        return self.cells[:, :, rest].copy()


def a_paged(
    layout: KvLayout,
    size: int,
    table: Sequence[int],
    *,
    blocks: int | None = None,
    heads: range | None = None,
    memory: tuple[int, int, int, int] = (0, 1, 2, 3),
    where: np.ndarray | None = None,
    seed: int = 0,
) -> Paged:
    """memory: which axis of [blocks, tokens, heads, dim] is where in memory; where: as in PackedPlane, instead."""
    count = max(table, default=0) + 2 if blocks is None else blocks
    shape = (count, size, layout.heads if heads is None else len(heads), layout.head_dim)
    stored = some_bits((layout.layers, layout.planes, *(shape[axis] for axis in memory)), layout, seed)
    cells = stored.transpose(0, 1, *(2 + memory.index(axis) for axis in range(4)))
    if where is None:
        planes = [[StridedPlane(plane) for plane in layer] for layer in cells]
        return Paged(PagedStore(layout, planes, table, heads), cells, tuple(table), None)
    packed = some_bits((layout.layers, layout.planes, count, shape[2], size * layout.head_dim), layout, seed)
    pads = [[PackedPlane(plane, where) for plane in layer] for layer in packed]
    return Paged(PagedStore(layout, pads, table, heads), packed, tuple(table), where)


class Tape:
    """An EdgeClient's producing half that keeps what is put."""

    def __init__(self) -> None:
        self.payloads: list[Payload] = []
        self.ended = False

    async def reserve(self, shapes: object) -> Reservation | None:
        return None

    async def put(self, request: str, edge: str, payload: Payload, reservation: object = None) -> None:
        self.payloads.append(payload)

    async def cleanup(self, request: str) -> None:
        self.ended = True


def a_chunk(
    values: np.ndarray, *, start: int = 0, layer: int = 0, head: int = 0, layout: KvLayout = LAYOUT, **meta: object
) -> Payload:
    """values: [layers, planes, tokens, heads, dim]"""
    stop = meta.pop("stop", None)
    more = {} if stop is None else {"kv_stop": stop}
    meta = {"kv_layer": layer, "kv_head": head, **meta, **more}
    return Payload(start, values.shape[2], stop is not None, {"kv": values}, meta, layout.dtypes)


def hello(layout: KvLayout = LAYOUT, start: int = 0, **changes: object) -> dict[str, object]:
    return {**layout.meta(), "kv_start": start, **changes}


def changed(payload: Payload, **meta: object) -> Payload:
    from msgspec.structs import replace as with_

    return with_(payload, meta={**payload.meta, **meta})


def variants(layout: KvLayout) -> Iterator[tuple[str, KvLayout]]:
    """(field, a layout that differs in it)"""
    for field in ("layers", "heads", "head_dim", "planes"):
        yield field, replace(layout, **{field: getattr(layout, field) + 1})
    yield "dtype", replace(layout, dtype="float16")
    yield "model", replace(layout, model="another")
