"""Where keys and values are: paged blocks, one contiguous array, or tensor-parallel shards of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from omni_runtime.kv.layout import KvLayout, Span


class KvStore(Protocol):
    """The keys and values of one request. Arrays are [layers, planes, tokens, heads, head_dim] of the layout's carrier."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def heads(self) -> range:
        """Those of the layout's heads that are here."""

    @property
    def capacity(self) -> int:
        """Tokens that there is room for, from position 0."""

    def read(self, span: Span, out: np.ndarray) -> None:
        """Copy a span, which is within heads and capacity, into `out`."""

    def write(self, span: Span, values: np.ndarray) -> None: ...

    def blocks(self, tokens: range) -> tuple[int, ...]:
        """Ids of the blocks that hold these tokens; none where there are no blocks."""


class Plane(Protocol):
    """Keys, or values, of one layer in all blocks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """blocks, tokens of a block, heads, head_dim"""

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, block: int, tokens: slice, heads: slice, out: np.ndarray) -> None:
        """`out`: [tokens, heads, head_dim]."""

    def write(self, block: int, tokens: slice, heads: slice, values: np.ndarray) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StridedPlane:
    """Over any numpy view [blocks, tokens of a block, heads, head_dim]: which axis is where in memory does not matter."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, block: int, tokens: slice, heads: slice, out: np.ndarray) -> None:
        np.copyto(out, self.array[block, tokens, heads])

    def write(self, block: int, tokens: slice, heads: slice, values: np.ndarray) -> None:
        np.copyto(self.array[block, tokens, heads], values)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlane:
    """Blocks in the order that matrix units want.

    cells: [blocks, heads, cells of a block]; where: [tokens of a block, head_dim], which cell has a value.
    """

    cells: np.ndarray
    where: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        blocks, heads, _ = self.cells.shape
        size, dim = self.where.shape
        return blocks, size, heads, dim

    @property
    def dtype(self) -> np.dtype:
        return self.cells.dtype

    def read(self, block: int, tokens: slice, heads: slice, out: np.ndarray) -> None:
        np.copyto(out, self.cells[block, heads][:, self.where[tokens]].swapaxes(0, 1))

    def write(self, block: int, tokens: slice, heads: slice, values: np.ndarray) -> None:
        self.cells[block, heads][:, self.where[tokens]] = values.swapaxes(0, 1)


class PagedStore:
    """Blocks of a paged cache, by a block table: token t is in block `table[t // block_size]`.

    planes: by layer, then keys and values. The table may grow while the request does (`update`).
    """

    def __init__(
        self, layout: KvLayout, planes: Sequence[Sequence[Plane]], table: Sequence[int], heads: range | None = None
    ) -> None:
        self._layout, self._planes = layout, planes
        self._heads = range(layout.heads) if heads is None else heads
        shapes = {plane.shape for layer in planes for plane in layer}
        if len(planes) != layout.layers or any(len(layer) != layout.planes for layer in planes) or len(shapes) != 1:
            raise ValueError(
                f"a cache of {layout.layers} layers of {layout.planes} planes, all of one shape, is needed"
            )
        ((self._count, self._size, *rest),) = shapes
        if rest != [len(self._heads), layout.head_dim] or planes[0][0].dtype != layout.carrier:
            raise ValueError(f"blocks have {rest} of {planes[0][0].dtype} a token; {layout}, heads {self._heads}")
        self._table: list[int] = []
        self.update(table)

    def update(self, table: Sequence[int]) -> None:
        """The request's table as it is now: what it was, and more. Raises ValueError for anything else."""
        if list(table[: len(self._table)]) != self._table:
            raise ValueError(
                f"the block table began with {self._table} and is now {list(table)}: the request has moved"
            )
        if len(set(table)) != len(table):
            raise ValueError(f"a block is in the table twice: {list(table)}")
        for block in table:
            if not 0 <= block < self._count:
                raise ValueError(f"block {block} is in the table; the cache has {self._count} blocks")
        self._table = list(table)

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def heads(self) -> range:
        return self._heads

    @property
    def capacity(self) -> int:
        return len(self._table) * self._size

    def read(self, span: Span, out: np.ndarray) -> None:
        for block, inside, at in self._pieces(span.tokens):
            for n, layer in enumerate(span.layers):
                for p, plane in enumerate(self._planes[layer]):
                    plane.read(block, inside, self._inside(span.heads), out[n, p, at])

    def write(self, span: Span, values: np.ndarray) -> None:
        for block, inside, at in self._pieces(span.tokens):
            for n, layer in enumerate(span.layers):
                for p, plane in enumerate(self._planes[layer]):
                    plane.write(block, inside, self._inside(span.heads), values[n, p, at])

    def blocks(self, tokens: range) -> tuple[int, ...]:
        return tuple(block for block, _, _ in self._pieces(tokens))

    def _inside(self, heads: range) -> slice:
        return slice(heads.start - self._heads.start, heads.stop - self._heads.start)

    def _pieces(self, tokens: range) -> Iterator[tuple[int, slice, slice]]:
        """(block, tokens of it, where they are in the span)"""
        at = tokens.start
        while at < tokens.stop:
            index, first = divmod(at, self._size)
            count = min(self._size - first, tokens.stop - at)
            yield (
                self._table[index],
                slice(first, first + count),
                slice(at - tokens.start, at - tokens.start + count),
            )
            at += count


class ContiguousStore:
    """One array [layers, planes, tokens, heads, head_dim]: what a DiT attends to beside its own tokens."""

    def __init__(self, layout: KvLayout, array: np.ndarray, heads: range | None = None) -> None:
        self._layout, self._array = layout, array
        self._heads = range(layout.heads) if heads is None else heads
        want = Span(range(layout.layers), self._heads, range(array.shape[2] if array.ndim == 5 else 0)).shape(layout)
        if array.shape != want or array.dtype != layout.carrier:
            raise ValueError(f"{array.dtype}{list(array.shape)} does not hold {layout}, heads {self._heads}")

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def heads(self) -> range:
        return self._heads

    @property
    def capacity(self) -> int:
        return int(self._array.shape[2])

    def read(self, span: Span, out: np.ndarray) -> None:
        np.copyto(out, self._of(span))

    def write(self, span: Span, values: np.ndarray) -> None:
        np.copyto(self._of(span), values)

    def blocks(self, tokens: range) -> tuple[int, ...]:
        return ()

    def _of(self, span: Span) -> np.ndarray:
        first = self._heads.start
        heads = slice(span.heads.start - first, span.heads.stop - first)
        layers, tokens = span.layers, span.tokens
        return self._array[layers.start : layers.stop, :, tokens.start : tokens.stop, heads]


class ShardedStore:
    """Tensor-parallel shards as one store; how many the other side has does not matter."""

    def __init__(self, shards: Sequence[KvStore]) -> None:
        self._shards = sorted(shards, key=lambda shard: shard.heads.start)
        for one, next_one in zip(self._shards, self._shards[1:], strict=False):
            if one.heads.stop != next_one.heads.start or one.layout != next_one.layout:
                raise ValueError(f"shards of one layout without gaps are needed: {one.heads}, then {next_one.heads}")

    @property
    def layout(self) -> KvLayout:
        return self._shards[0].layout

    @property
    def heads(self) -> range:
        return range(self._shards[0].heads.start, self._shards[-1].heads.stop)

    @property
    def capacity(self) -> int:
        return min(shard.capacity for shard in self._shards)

    def read(self, span: Span, out: np.ndarray) -> None:
        for shard, part, at in self._parts(span):
            shard.read(part, out[..., at, :])

    def write(self, span: Span, values: np.ndarray) -> None:
        for shard, part, at in self._parts(span):
            shard.write(part, values[..., at, :])

    def blocks(self, tokens: range) -> tuple[int, ...]:
        return tuple(dict.fromkeys(block for shard in self._shards for block in shard.blocks(tokens)))

    def _parts(self, span: Span) -> Iterator[tuple[KvStore, Span, slice]]:
        for shard in self._shards:
            heads = common(span.heads, shard.heads)
            if heads:
                at = slice(heads.start - span.heads.start, heads.stop - span.heads.start)
                yield shard, Span(span.layers, heads, span.tokens), at


def common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
