"""Pods onto nodes: exact against brute force on small instances, an answer in bounded time on large ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_operator.placement.packing import BinClass, Item, Packing, pack

Bin = tuple[tuple[int, ...], str]


def classes_of(bins: Sequence[Bin], allowed: Sequence[frozenset[int]]) -> tuple[list[BinClass], list[frozenset[int]]]:
    """Bins (free amounts, domain) as classes; allowed: per item the bins that it may use, turned into classes."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, (free, domain) in enumerate(bins):
        may = tuple(index in a for a in allowed)
        found.setdefault((free, domain, may), []).append(index)
    classes = [BinClass(key[0], tuple(members), key[1]) for key, members in found.items()]  # type: ignore[arg-type]
    return classes, [frozenset(c for c, cls in enumerate(classes) if cls.members[0] in a) for a in allowed]


def brute_force(items: Sequence[Item], bins: Sequence[Bin], allowed: Sequence[frozenset[int]]) -> bool:
    """Every assignment of every pod to every bin."""
    pods = [(item, may) for item, may in zip(items, allowed, strict=True) for _ in range(item.count)]
    for choice in itertools.product(range(len(bins)), repeat=len(pods)):
        left = [list(free) for free, _ in bins]
        domains: dict[int, set[str]] = {}
        for (item, may), target in zip(pods, choice, strict=True):
            if target not in may:
                break
            for k, amount in enumerate(item.size):
                left[target][k] -= amount
            if item.tied is not None:
                domains.setdefault(item.tied, set()).add(bins[target][1])
        else:
            if all(a >= 0 for row in left for a in row) and all(len(d) == 1 for d in domains.values()):
                return True
    return False


def is_right(packing: Packing, items: Sequence[Item], bins: Sequence[Bin], allowed: Sequence[frozenset[int]]) -> bool:
    """The placement keeps every rule, checked from scratch."""
    assert packing.placed is not None
    by_name = {item.name: (item, may) for item, may in zip(items, allowed, strict=True)}
    left = [list(free) for free, _ in bins]
    domains: dict[int, set[str]] = {}
    for name, _, target in packing.placed:
        item, may = by_name[name]
        if target not in may:
            return False
        for k, amount in enumerate(item.size):
            left[target][k] -= amount
        if item.tied is not None:
            domains.setdefault(item.tied, set()).add(bins[target][1])
    once = {(name, replica) for name, replica, _ in packing.placed}
    complete = len(once) == len(packing.placed) == sum(i.count for i in items)
    return complete and all(a >= 0 for row in left for a in row) and all(len(d) == 1 for d in domains.values())


def an_instance(seed: int) -> tuple[list[Item], list[Bin], list[frozenset[int]]]:
    """Two to three kinds of pods, up to six of them, on up to four nodes with three amounts; tight on purpose."""
    pick = random.Random(seed)
    bins: list[Bin] = [
        ((pick.choice((2, 4)), pick.randint(2, 8), pick.randint(2, 8)), pick.choice("ab"))
        for _ in range(pick.randint(1, 4))
    ]
    if pick.random() < 0.4:
        bins = [bins[0]] * len(bins)
    kinds = pick.randint(2, 3)
    tied = pick.random() < 0.3
    items, allowed = [], []
    for k in range(kinds):
        size = (pick.randint(0, 3), pick.randint(0, 4), pick.randint(0, 4))
        items.append(Item(f"g{k}", pick.randint(1, 2), size, frozenset(), 0 if tied and k < 2 else None))
        allowed.append(frozenset(b for b in range(len(bins)) if pick.random() < 0.85))
    return items, bins, allowed


def test_2000_random_instances_agree_with_brute_force() -> None:
    feasible = 0
    for seed in range(2000):
        items, bins, allowed = an_instance(seed)
        classes, by_class = classes_of(bins, allowed)
        asked = [Item(i.name, i.count, i.size, a, i.tied) for i, a in zip(items, by_class, strict=True)]
        packing = pack(asked, classes)
        assert packing.proven, f"instance {seed} is small"
        assert (packing.placed is not None) == brute_force(items, bins, allowed), f"instance {seed}"
        if packing.placed is not None:
            assert is_right(packing, items, bins, allowed), f"instance {seed}"
            feasible += 1
    assert 600 < feasible < 1400, f"{feasible} of 2000: instances must be neither all easy nor all hopeless"


def all_in(count: int) -> frozenset[int]:
    return frozenset(range(count))


def test_what_greedy_gets_wrong_the_search_finds() -> None:
    """Best fit puts 4 and 3 together first; only 4+4 and 3+3+2 fill both bins."""
    items = [Item("four", 2, (4,), all_in(1)), Item("three", 2, (3,), all_in(1)), Item("two", 1, (2,), all_in(1))]
    packing = pack(items, [BinClass((8,), (0, 1))])
    assert packing.placed is not None


def test_no_place_is_proved_for_equal_nodes_without_trying_each() -> None:
    """Thirty pods of 3 on twenty nodes of 4: the sum fits, no pair does. Symmetry makes that a handful of states."""
    packing = pack([Item("three", 30, (3, 1), all_in(1))], [BinClass((4, 9), tuple(range(20)))])
    assert packing == Packing(None)
    mixed = [Item("three", 20, (3,), all_in(1)), Item("two", 11, (2,), all_in(1))]
    stuck = pack(mixed, [BinClass((4,), tuple(range(25)))])
    assert stuck.placed is None
    assert stuck.proven
    assert stuck.states < 2000


def test_a_search_that_ends_at_its_limit_proves_nothing() -> None:
    """Three odd sizes that fill ten bins to the last unit, or not: too many ways to try them all."""
    pick = random.Random(7)
    unproven = []
    for _ in range(20):
        sizes = [pick.randint(28, 38) for _ in range(29)]
        rest = 1000 - sum(sizes)
        items = [Item(f"i{k}", 1, (size,), all_in(1)) for k, size in enumerate([*sizes, max(1, rest)])]
        packing = pack(items, [BinClass((100,), tuple(range(10)))], max_states=100)
        if packing.placed is None and not packing.proven:
            unproven.append(packing)
    assert unproven
    assert all(p.states <= 101 for p in unproven)


def test_a_large_cluster_is_answered_by_kinds_of_nodes() -> None:
    classes = [BinClass((8, 64), tuple(range(500)), "a"), BinClass((4, 64), tuple(range(500, 1000)), "b")]
    packing = pack([Item("thinker", 40, (4, 8), all_in(2)), Item("talker", 60, (1, 4), all_in(2))], classes)
    assert packing.placed is not None
    assert packing.states == 0, "best fit found it"


amounts = st.integers(0, 6)


@given(
    st.lists(st.tuples(st.integers(1, 3), amounts, amounts), min_size=1, max_size=3),
    st.lists(st.tuples(amounts, amounts), min_size=1, max_size=4),
    st.tuples(amounts, amounts),
)
def test_one_more_node_never_hurts(
    pods: list[tuple[int, int, int]], nodes: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    def feasible(bins: list[tuple[int, int]]) -> bool:
        classes = [BinClass(free, (i,)) for i, free in enumerate(bins)]
        items = [Item(f"g{k}", n, (a, b), all_in(len(bins))) for k, (n, a, b) in enumerate(pods)]
        return pack(items, classes).placed is not None

    if feasible(nodes):
        assert feasible([*nodes, more])


@pytest.mark.parametrize("domain_of_second", ["a", "b"])
def test_tied_pods_share_a_domain(domain_of_second: str) -> None:
    classes = [BinClass((1,), (0,), "a"), BinClass((1,), (1,), domain_of_second)]
    items = [Item("thinker", 1, (1,), all_in(2), tied=0), Item("talker", 1, (1,), all_in(2), tied=0)]
    assert (pack(items, classes).placed is not None) == (domain_of_second == "a")
