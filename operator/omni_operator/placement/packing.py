"""Pods onto nodes: numbers only. Exact with branch and bound as far as a limit of states, a heuristic before it. Pure.

Symmetry. Thousands of nodes are a handful of kinds: nodes of the same free amounts, domain and groups that may use
them are one class, and only one untouched node of a class is tried. Nodes that became equal while packing count as
one too. States that failed are remembered by what is left of the touched nodes, whichever nodes these are.
"""

from __future__ import annotations

import heapq
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_STATES = 20_000
# A state looks at each kind of node: with many kinds there are fewer states, so that an answer takes a fraction of a
# second at most.
MAX_LOOKS = 300_000
SHUFFLES = 12
MANY_PODS = 200  # beyond it the orders of the heuristic are tried, but not shuffled
UNBOUNDED = 1 << 30  # pods that ask for nothing
Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """`count` equal pods. allowed: classes of bins by index. tied: items of one number stay in one domain."""

    name: str
    count: int
    size: Size
    allowed: frozenset[int]
    tied: int | None = None


@dataclass(frozen=True, slots=True)
class BinClass:
    """Equal nodes: what is free on each, and their domain."""

    free: Size
    members: tuple[int, ...]
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Packing:
    """`placed`: (item name, replica, member) per pod where a place was found; else None. proven: None is final."""

    placed: tuple[tuple[str, int, int], ...] | None
    proven: bool = True
    states: int = 0


def pack(items: Sequence[Item], classes: Sequence[BinClass], max_states: int = MAX_STATES) -> Packing:
    """A place for every pod; or None, which is a proof unless the limit of states was reached."""
    items, classes = _simplified([i for i in items if i.count], classes)
    if _impossible(items, classes):
        return Packing(None)
    for order in _orders(items):
        placed = _greedy(order, classes)
        if placed is not None:
            return Packing(placed)
    states = min(max_states, max(50, MAX_LOOKS // max(1, len(classes))))
    return _Search(_by_hardness(items, classes), classes, states).run()


def surely_too_much(items: Sequence[Item], classes: Sequence[BinClass]) -> bool:
    """Quick bounds: an item alone, or the sum of an amount, is more than the nodes have that may be used."""
    return _impossible(*_simplified([i for i in items if i.count], classes))


def _impossible(items: Sequence[Item], classes: Sequence[BinClass]) -> bool:
    return any(_room(item, classes) < item.count for item in items) or _overfull(items, classes)


def _simplified(items: Sequence[Item], classes: Sequence[BinClass]) -> tuple[list[Item], list[BinClass]]:
    """The same question with fewer kinds of nodes: nobody can use more of a node than all pods together ask for, and
    nodes that hold none of them do not matter."""
    dimensions = range(len(items[0].size) if items else 0)
    most = tuple(sum(i.size[k] * i.count for i in items) for k in dimensions)
    found: dict[tuple[Size, str, tuple[bool, ...]], list[int]] = {}
    for index, cls in enumerate(classes):
        free = tuple(map(min, cls.free, most))
        may = tuple(index in i.allowed and _fits(i.size, free) for i in items)
        if any(may):
            found.setdefault((free, cls.domain, may), []).extend(cls.members)
    merged = [BinClass(free, tuple(members), domain) for (free, domain, _), members in found.items()]
    allowed = [frozenset(c for c, (_, _, may) in enumerate(found) if may[k]) for k in range(len(items))]
    return [Item(i.name, i.count, i.size, a, i.tied) for i, a in zip(items, allowed, strict=True)], merged


def room(item: Item, classes: Sequence[BinClass]) -> int:
    """How many pods of this item fit when nothing else is placed: an upper bound of its replicas."""
    return _room(item, classes)


def _room(item: Item, classes: Sequence[BinClass]) -> int:
    return sum(_times(item.size, classes[c].free) * len(classes[c].members) for c in item.allowed)


def _times(size: Size, free: Size) -> int:
    return min((f // s for s, f in zip(size, free, strict=True) if s), default=UNBOUNDED)


def _overfull(items: Sequence[Item], classes: Sequence[BinClass]) -> bool:
    """For each amount: items that may only use a set of classes ask for more than these have."""
    for allowed in {i.allowed for i in items}:
        inside = [i for i in items if i.allowed <= allowed]
        for k in range(len(items[0].size)):
            need = sum(i.size[k] * i.count for i in inside)
            if need > sum(classes[c].free[k] * len(classes[c].members) for c in allowed):
                return True
    return False


def _by_hardness(items: Sequence[Item], classes: Sequence[BinClass]) -> list[Item]:
    """Fewest places per pod first: what fits nowhere shows early."""
    return sorted(items, key=lambda i: (_room(i, classes) / i.count, tuple(-s for s in i.size), i.name))


def _orders(items: Sequence[Item]) -> Iterable[list[Item]]:
    biggest = sorted(items, key=lambda i: (tuple(-s for s in i.size), i.name))
    yield biggest
    yield sorted(items, key=lambda i: (len(i.allowed), tuple(-s for s in i.size), i.name))
    shuffled = random.Random(0)
    few = 1 < len(items) and sum(i.count for i in items) <= MANY_PODS
    for _ in range(SHUFFLES if few else 0):
        order = list(items)
        shuffled.shuffle(order)
        yield order


@dataclass(slots=True, eq=False)
class _Node:
    """A touched node while packing."""

    cls: int
    index: int  # into the members of its class
    free: Size
    fresh: bool = False  # nothing was placed on it yet


def _greedy(order: Sequence[Item], classes: Sequence[BinClass]) -> tuple[tuple[str, int, int], ...] | None:
    """Best fit: each pod where the least is left of what it uses, and where a node is in use already."""
    touched: list[_Node] = []
    used = [0] * len(classes)
    domains: dict[int, str] = {}
    placed: list[tuple[str, int, int]] = []
    for item in order:
        bound = domains.get(item.tied) if item.tied is not None else None
        ranked = list(_ranked(item, touched, used, classes, bound))
        heapq.heapify(ranked)
        for replica in range(item.count):
            # Pods of one item are equal: only the node that was used last has another rank than before.
            while ranked and bound is not None and classes[ranked[0][2].cls].domain != bound:
                heapq.heappop(ranked)
            if not ranked:
                return None
            _, number, node = heapq.heappop(ranked)
            if node.fresh:
                node.fresh = False
                used[node.cls] += 1
                touched.append(node)
                if used[node.cls] < len(classes[node.cls].members):
                    following = _Node(node.cls, used[node.cls], classes[node.cls].free, fresh=True)
                    heapq.heappush(ranked, (_leftover(item, following), number, following))
            node.free = _minus(node.free, item.size)
            if _fits(item.size, node.free):
                heapq.heappush(ranked, (_leftover(item, node), len(touched) + len(classes) + replica, node))
            if item.tied is not None and bound is None:
                bound = domains[item.tied] = classes[node.cls].domain
            placed.append((item.name, replica, classes[node.cls].members[node.index]))
    return tuple(placed)


def _ranked(
    item: Item, touched: Sequence[_Node], used: Sequence[int], classes: Sequence[BinClass], bound: str | None
) -> Iterator[tuple[tuple[float, ...], int, _Node]]:
    """(rank, tie-breaker, node) of every touched node and one untouched node per class on which the item fits."""
    fresh = (
        _Node(c, used[c], classes[c].free, fresh=True)
        for c in sorted(item.allowed)
        if used[c] < len(classes[c].members)
    )
    for number, node in enumerate((*touched, *fresh)):
        if node.cls in item.allowed and _fits(item.size, node.free) and bound in (None, classes[node.cls].domain):
            yield _leftover(item, node), number, node


def _leftover(item: Item, node: _Node) -> tuple[float, ...]:
    """Amounts that the pod does not use (devices on a node for a pod without any) first, then the tightest fit."""
    unused = 0
    tight = 0.0
    for s, f in zip(item.size, node.free, strict=True):
        if f:
            if s:
                tight += (f - s) / f
            else:
                unused += 1
    return (unused, tight, node.fresh)


def _fits(size: Size, free: Size) -> bool:
    return all(map(operator.le, size, free))


def _minus(free: Size, size: Size) -> Size:
    return tuple(map(operator.sub, free, size))


class _Search:
    """Depth-first over pods, one candidate per distinct state of a node."""

    def __init__(self, items: Sequence[Item], classes: Sequence[BinClass], max_states: int) -> None:
        self._pods = [(item, replica) for item in items for replica in range(item.count)]
        self._classes = classes
        self._limit = max_states
        self._touched: list[_Node] = []
        self._used = [0] * len(classes)
        self._domains: dict[int, str] = {}
        self._failed: set[tuple[object, ...]] = set()
        self._placed: list[tuple[str, int, int]] = []
        self._states = 0

    def run(self) -> Packing:
        """Iterative, so that no number of pods meets Python's limit of recursion."""
        stack = [iter(self._candidates(0))]
        undo: list[tuple[_Node, Size, bool, int | None, str | None]] = []
        keys = [self._key(0)]
        while stack:
            depth = len(stack) - 1
            if depth == len(self._pods):
                return Packing(tuple(self._placed), True, self._states)
            node = next(stack[-1], None)
            if node is None:
                self._failed.add(keys[-1])
                stack.pop()
                keys.pop()
                if undo:
                    self._undo(*undo.pop())
                continue
            self._states += 1
            if self._states > self._limit:
                return Packing(None, False, self._states)
            undo.append(self._place(depth, node))
            key = self._key(depth + 1)
            if key in self._failed:
                self._undo(*undo.pop())
                continue
            stack.append(iter(self._candidates(depth + 1)))
            keys.append(key)
        return Packing(None, True, self._states)

    def _candidates(self, depth: int) -> list[_Node]:
        if depth == len(self._pods):
            return []
        item = self._pods[depth][0]
        bound = self._domains.get(item.tied) if item.tied is not None else None
        ranked = sorted(_ranked(item, self._touched, self._used, self._classes, bound), key=lambda entry: entry[:2])
        seen: set[tuple[int, Size]] = set()
        found = []
        for _, _, node in ranked:
            if (node.cls, node.free) not in seen:
                seen.add((node.cls, node.free))
                found.append(node)
        return found

    def _place(self, depth: int, node: _Node) -> tuple[_Node, Size, bool, int | None, str | None]:
        item, replica = self._pods[depth]
        before, fresh = node.free, node.fresh
        if fresh:
            node.fresh = False
            self._touched.append(node)
            self._used[node.cls] += 1
        node.free = _minus(node.free, item.size)
        old = self._domains.get(item.tied) if item.tied is not None else None
        if item.tied is not None:
            self._domains[item.tied] = self._classes[node.cls].domain
        self._placed.append((item.name, replica, self._classes[node.cls].members[node.index]))
        return node, before, fresh, item.tied, old

    def _undo(self, node: _Node, before: Size, fresh: bool, tied: int | None, old: str | None) -> None:
        self._placed.pop()
        node.free = before
        if fresh:
            node.fresh = True
            self._touched.pop()  # last in, first out: the search undoes in the order in which it placed
            self._used[node.cls] -= 1
        if tied is not None:
            if old is None:
                self._domains.pop(tied, None)
            else:
                self._domains[tied] = old

    def _key(self, depth: int) -> tuple[object, ...]:
        touched = tuple(sorted((n.cls, n.free) for n in self._touched))
        return depth, touched, tuple(sorted(self._domains.items()))
