"""Pure functions on a graph of stage names. No specs, no errors: callers word what is wrong. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

Edge = tuple[str, str]


def successors(nodes: Iterable[str], edges: Iterable[Edge]) -> dict[str, tuple[str, ...]]:
    """Node -> the nodes that it feeds. Edges that name an unknown node are left out."""
    following: dict[str, list[str]] = {node: [] for node in nodes}
    for source, to in edges:
        if source in following and to in following and to not in following[source]:
            following[source].append(to)
    return {node: tuple(targets) for node, targets in following.items()}


def topological_order(nodes: Sequence[str], edges: Iterable[Edge]) -> tuple[str, ...] | None:
    """Every node after all that feed it; among free nodes the one that `nodes` lists first. None if there is a cycle."""
    following = successors(nodes, edges)
    rank = {node: i for i, node in enumerate(nodes)}
    waiting_for = dict.fromkeys(nodes, 0)
    for targets in following.values():
        for to in targets:
            waiting_for[to] += 1
    free = [rank[node] for node, count in waiting_for.items() if count == 0]
    heapq.heapify(free)
    order: list[str] = []
    while free:
        node = nodes[heapq.heappop(free)]
        order.append(node)
        for to in following[node]:
            waiting_for[to] -= 1
            if waiting_for[to] == 0:
                heapq.heappush(free, rank[to])
    return tuple(order) if len(order) == len(rank) else None


def find_cycle(nodes: Sequence[str], edges: Iterable[Edge]) -> tuple[str, ...] | None:
    """One cycle with its first node repeated at the end (a, b, a), or None."""
    following = successors(nodes, edges)
    done: set[str] = set()
    for start in following:
        path: list[str] = []
        on_path: set[str] = set()
        stack: list[tuple[str, int]] = [(start, 0)]  # (node, index of its next target): no recursion limit
        while stack:
            node, index = stack.pop()
            if index == 0:
                if node in done:
                    continue
                path.append(node)
                on_path.add(node)
            if index < len(following[node]):
                stack.append((node, index + 1))
                target = following[node][index]
                if target in on_path:
                    return (*path[path.index(target) :], target)
                stack.append((target, 0))
            else:
                path.pop()
                on_path.discard(node)
                done.add(node)
    return None


def reachable(starts: Iterable[str], following: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The starts and everything that they feed, directly or not."""
    seen: set[str] = set()
    pending = [node for node in starts if node in following]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(following[node])
    return frozenset(seen)


def ancestors(targets: Iterable[str], nodes: Sequence[str], edges: Iterable[Edge]) -> frozenset[str]:
    """The targets and everything that feeds them, directly or not."""
    return reachable(targets, successors(nodes, [(to, source) for source, to in edges]))
