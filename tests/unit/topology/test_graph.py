"""Order, cycles and reach on small graphs; random graphs are in the property tests of the resolver."""

from __future__ import annotations

import itertools

import pytest

from omni_runtime.topology.graph import ancestors, find_cycle, reachable, successors, topological_order


@pytest.mark.parametrize(
    ("nodes", "edges", "order"),
    [
        ("cba", [("a", "b"), ("b", "c")], "abc"),
        ("bac", [], "bac"),
        ("abcd", [("d", "a")], "bcda"),
        ("abcd", [("a", "c"), ("a", "b"), ("b", "d"), ("c", "d")], "abcd"),
        ("ab", [("a", "b"), ("a", "b")], "ab"),
        ("ab", [("a", "zzz")], "ab"),
    ],
)
def test_order(nodes: str, edges: list[tuple[str, str]], order: str) -> None:
    assert topological_order(list(nodes), edges) == tuple(order)


@pytest.mark.parametrize(
    ("edges", "cycle"),
    [
        ([("a", "b"), ("b", "a")], "aba"),
        ([("a", "b"), ("b", "c"), ("c", "b")], "bcb"),
        ([("c", "c")], "cc"),
        ([("a", "b"), ("a", "c"), ("b", "c")], None),
    ],
)
def test_cycle(edges: list[tuple[str, str]], cycle: str | None) -> None:
    assert find_cycle(list("abc"), edges) == (tuple(cycle) if cycle else None)
    assert (topological_order(list("abc"), edges) is None) == (cycle is not None)


def test_a_long_chain_needs_no_recursion() -> None:
    nodes = [str(i) for i in range(5000)]
    edges = list(itertools.pairwise(nodes))
    assert find_cycle(nodes, edges) is None
    assert find_cycle(nodes, [*edges, (nodes[-1], nodes[0])]) == (*nodes, nodes[0])


def test_reach_in_both_directions() -> None:
    edges = [("a", "b"), ("b", "c"), ("x", "c")]
    assert reachable(["a"], successors("abcx", edges)) == frozenset("abc")
    assert ancestors(["c"], list("abcx"), edges) == frozenset("abcx")
    assert ancestors(["b"], list("abcx"), edges) == frozenset("ab")
    assert ancestors([], list("abcx"), edges) == frozenset()
