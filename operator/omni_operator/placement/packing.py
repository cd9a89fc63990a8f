"""Pods onto nodes: numbers only. Exact with branch and bound as far as a limit of states, a heuristic before it. Pure.

Symmetry. Thousands of nodes are a handful of kinds: nodes of the same free amounts, domain and groups that may use
them are one class, and only one untouched node of a class is tried. Nodes that became equal while packing count as
one too. States that failed are remembered by what is left of the touched nodes, whichever nodes these are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_STATES = 20_000
SHUFFLES = 12
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
    items = [i for i in items if i.count]
    if any(_room(item, classes) < item.count for item in items):
        return Packing(None)
    if _overfull(items, classes):
        return Packing(None)
    for order in _orders(items):
        placed = _greedy(order, classes)
        if placed is not None:
            return Packing(placed)
    return _Search(_by_hardness(items, classes), classes, max_states).run()


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
    for _ in range(SHUFFLES if len(items) > 1 else 0):
        order = list(items)
        shuffled.shuffle(order)
        yield order


@dataclass(slots=True)
class _Node:
    """A touched node while packing."""

    cls: int
    index: int  # into the members of its class
    free: Size


def _greedy(order: Sequence[Item], classes: Sequence[BinClass]) -> tuple[tuple[str, int, int], ...] | None:
    """Best fit: each pod where the least is left of what it uses, and where a node is in use already."""
    touched: list[_Node] = []
    used = [0] * len(classes)
    domains: dict[int, str] = {}
    placed: list[tuple[str, int, int]] = []
    for item in order:
        for replica in range(item.count):
            choice = _best(item, touched, used, classes, domains)
            if choice is None:
                return None
            if choice.index == used[choice.cls] and not any(n is choice for n in touched):
                used[choice.cls] += 1
                touched.append(choice)
            choice.free = _minus(choice.free, item.size)
            if item.tied is not None:
                domains[item.tied] = classes[choice.cls].domain
            placed.append((item.name, replica, classes[choice.cls].members[choice.index]))
    return tuple(placed)


def _best(
    item: Item, touched: Sequence[_Node], used: Sequence[int], classes: Sequence[BinClass], domains: dict[int, str]
) -> _Node | None:
    bound = domains.get(item.tied) if item.tied is not None else None
    fresh = [_Node(c, used[c], classes[c].free) for c in sorted(item.allowed) if used[c] < len(classes[c].members)]
    best: tuple[tuple[float, ...], _Node] | None = None
    for node in (*touched, *fresh):
        if node.cls not in item.allowed or not _fits(item.size, node.free):
            continue
        if bound is not None and classes[node.cls].domain != bound:
            continue
        score = _leftover(item, node, fresh)
        if best is None or score < best[0]:
            best = (score, node)
    return best[1] if best else None


def _leftover(item: Item, node: _Node, fresh: Sequence[_Node]) -> tuple[float, ...]:
    """Amounts that the pod does not use (devices on a node for a pod without any) first, then the tightest fit."""
    unused = sum(1 for s, f in zip(item.size, node.free, strict=True) if not s and f)
    tight = sum((f - s) / f for s, f in zip(item.size, node.free, strict=True) if s and f)
    return (unused, tight, any(n is node for n in fresh))


def _fits(size: Size, free: Size) -> bool:
    return all(s <= f for s, f in zip(size, free, strict=True))


def _minus(free: Size, size: Size) -> Size:
    return tuple(f - s for f, s in zip(free, size, strict=True))


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
        seen: set[tuple[int, Size]] = set()
        found = []
        fresh = [_Node(c, self._used[c], self._classes[c].free) for c in sorted(item.allowed)
                 if self._used[c] < len(self._classes[c].members)]  # fmt: skip
        for node in (*self._touched, *fresh):
            state = (node.cls, node.free)
            if state in seen or node.cls not in item.allowed or not _fits(item.size, node.free):
                continue
            if bound is not None and self._classes[node.cls].domain != bound:
                continue
            seen.add(state)
            found.append(node)
        return sorted(found, key=lambda n: _leftover(item, n, fresh))

    def _place(self, depth: int, node: _Node) -> tuple[_Node, Size, bool, int | None, str | None]:
        item, replica = self._pods[depth]
        before, fresh = node.free, not any(n is node for n in self._touched)
        if fresh:
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
            self._touched.remove(node)
            self._used[node.cls] -= 1
        if tied is not None:
            if old is None:
                self._domains.pop(tied, None)
            else:
                self._domains[tied] = old

    def _key(self, depth: int) -> tuple[object, ...]:
        touched = tuple(sorted((n.cls, n.free) for n in self._touched))
        return depth, touched, tuple(sorted(self._domains.items()))
