"""Arena, allocator, slab pool and ledger: nothing is handed out twice, nothing stale is readable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_runtime.connectors.arena import PAGE, Allocator, Arena, SlabPool, create_file, largest_slab
from omni_runtime.connectors.ledger import QUEUE, SlabLedger
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import Slab

MIB = 1 << 20


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400), st.integers(0, 30)), max_size=80))
def test_allocator_never_overlaps_and_always_coalesces(steps: list[tuple[bool, int, int]]) -> None:
    allocator = Allocator(1000, 2000)
    live: dict[int, int] = {}
    for allocate, length, which in steps:
        if allocate:
            at = allocator.allocate(length)
            if at is None:
                continue
            assert 1000 <= at
            assert at + length <= 3000
            assert all(at + length <= other or other + size <= at for other, size in live.items())
            live[at] = length
        elif live:
            at = sorted(live)[which % len(live)]
            assert allocator.free(at) == live.pop(at)
        assert allocator.used == sum(live.values())
    for at in list(live):
        allocator.free(at)
    assert allocator.empty
    assert allocator.allocate(2000) == 1000


def test_freeing_twice_is_an_error() -> None:
    allocator = Allocator(0, 100)
    at = allocator.allocate(10)
    assert at is not None
    allocator.free(at)
    with pytest.raises(KeyError):
        allocator.free(at)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(create_file(str(tmp_path), MIB), MIB)
    yield arena
    arena.close()


def test_the_file_has_no_name(arena: Arena, tmp_path: Path) -> None:
    """No crash can leave a file behind, and no id can become a path (R11, R62)."""
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(arena.fd).st_mode & 0o777 == 0o600


def test_a_volume_that_is_too_small_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="does not fit into"):
        create_file(str(tmp_path), 1 << 60)


def test_a_stale_handle_cannot_read_the_next_owner(arena: Arena) -> None:
    """R62: the place is reused, the generation is not."""
    pool = SlabPool(arena, session=1)
    assert pool.add_extent(0, MIB)
    old = pool.allocate(100)
    assert old is not None
    arena.data(old)[:] = b"a" * 100
    pool.free(old)
    new = pool.allocate(100)
    assert new is not None
    assert new.offset == old.offset
    with pytest.raises(ProtocolError, match="stale"):
        arena.data(old)
    pool.free(old)  # late and stale: the new owner keeps its bytes
    assert bytes(arena.data(new)) == b"a" * 100


def test_generations_of_two_sessions_never_meet(arena: Arena) -> None:
    first, second = SlabPool(arena, session=1), SlabPool(arena, session=2)
    first.add_extent(0, MIB // 2)
    second.add_extent(MIB // 2, MIB // 2)
    generations = {slab.generation for pool in (first, second) for _ in range(50) if (slab := pool.allocate(64))}
    assert len(generations) == 100


@pytest.mark.parametrize(
    "slab",
    [Slab(0, 10, 0), Slab(65, 10, 0), Slab(64, MIB, 0), Slab(1 << 62, 64, 0), Slab(64, 10, 1)],
    ids=["before the first header", "not aligned", "past the end", "far away", "never stamped"],
)
def test_handles_that_nobody_made(arena: Arena, slab: Slab) -> None:
    with pytest.raises(ProtocolError):
        arena.data(slab)


def test_empty_extents_go_back(arena: Arena) -> None:
    pool = SlabPool(arena, session=1)
    for i in range(3):
        pool.add_extent(i * 64 * 1024, 64 * 1024)
    slabs = [pool.allocate(60 * 1024) for _ in range(3)]
    assert all(slabs)
    assert pool.allocate(60 * 1024) is None
    assert pool.take_empty_extents(keep=1) == []
    for slab in slabs:
        assert slab is not None
        pool.free(slab)
    assert len(pool.take_empty_extents(keep=1)) == 2
    assert pool.used_bytes == 0


def test_one_chunk_cannot_fill_the_arena() -> None:
    assert largest_slab(64 * MIB) < 16 * MIB
    assert (largest_slab(64 * MIB) + 128) % PAGE == 0


def test_a_slab_is_freed_once_and_by_its_holder_only() -> None:
    ledger = SlabLedger()
    slab = Slab(64, 10, 1)
    ledger.enter(slab, owner=1)
    with pytest.raises(ProtocolError, match="twice"):
        ledger.enter(slab, owner=1)
    assert ledger.release(slab, holder=2) is None, "the consumer has not seen it yet"
    ledger.deliver(slab, 2)
    assert ledger.release(slab, holder=QUEUE) is None
    assert ledger.held_by(2) == (slab,)
    assert ledger.release(slab, holder=3) is None, "another session"
    assert ledger.outstanding(1) == 1
    assert ledger.release(slab, holder=2) == 1
    assert ledger.release(slab, holder=2) is None, "repeated release"
    assert (len(ledger), ledger.outstanding(1), ledger.held_by(2)) == (0, 0, ())
