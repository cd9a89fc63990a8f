"""The registry agrees with itself: names, engines, payloads, and the defaults that come with a family."""

from __future__ import annotations

import pytest

from omni_runtime.errors import FieldError
from omni_runtime.topology import graph
from omni_runtime.topology.engines import ENGINES, ArgSpec, ArgType, BadArg, canonical_arg, payloads_between
from omni_runtime.topology.registry import TOPOLOGIES, find_topology, one_of
from omni_runtime.topology.types import EngineKind, Modality, Topology

REGISTERED = [t for t in TOPOLOGIES.values() if t.stages]


def test_unknown_names_list_the_known_and_the_closest() -> None:
    found = find_topology("qwen3_omni")
    assert isinstance(found, FieldError)
    assert found.fix == "use one of custom, qwen3_omni_moe, smol_omni (did you mean qwen3_omni_moe?)"
    assert find_topology("zzz") == FieldError(
        "spec.topology", "zzz", "unknown topology", "use one of custom, qwen3_omni_moe, smol_omni"
    )


def test_known_names_are_found() -> None:
    for name, topology in TOPOLOGIES.items():
        assert find_topology(name) is topology
        assert topology.name == name


@pytest.mark.parametrize("topology", REGISTERED, ids=lambda t: t.name)
def test_edges_carry_what_both_engines_understand(topology: Topology) -> None:
    for edge in topology.edges:
        source, to = topology.stage(edge.source), topology.stage(edge.to)
        assert source is not None
        assert to is not None
        assert edge.payload in payloads_between(source.engine, to.engine)


@pytest.mark.parametrize("topology", REGISTERED, ids=lambda t: t.name)
def test_stages_are_listed_in_the_order_of_the_graph_and_speak(topology: Topology) -> None:
    names = [s.name for s in topology.stages]
    assert list(graph.topological_order(names, [(e.source, e.to) for e in topology.edges]) or ()) == names
    assert {m for s in topology.stages for m in s.emits} == {Modality.TEXT, Modality.AUDIO}


@pytest.mark.parametrize("topology", REGISTERED, ids=lambda t: t.name)
def test_engine_args_of_a_family_are_known_to_its_engines(topology: Topology) -> None:
    for stage in topology.stages:
        for name, value in stage.engine_args:
            spec = ENGINES[stage.engine].arg(name)
            assert spec is not None, f"{stage.name}: {name}"
            assert canonical_arg(spec, value) == value


@pytest.mark.parametrize("kind", EngineKind)
def test_every_engine_is_described_and_no_arg_is_both_known_and_refused(kind: EngineKind) -> None:
    engine = ENGINES[kind]
    names = [a.name for a in engine.args]
    assert len(set(names)) == len(names)
    assert not set(names) & {name for name, _ in engine.refused}


@pytest.mark.parametrize(
    ("spec", "value", "canonical"),
    [
        (ArgSpec("n", ArgType.INT, 1, 10), "007", "7"),
        (ArgSpec("n", ArgType.INT), "-3", "-3"),
        (ArgSpec("x", ArgType.FLOAT), "1e-3", "0.001"),
        (ArgSpec("x", ArgType.FLOAT), "2", "2.0"),
        (ArgSpec("b", ArgType.BOOL), "true", "true"),
        (ArgSpec("s", ArgType.STR), "a b", "a b"),
        (ArgSpec("j", ArgType.JSON), '{"b": 1, "a": [ ]}', '{"a":[],"b":1}'),
    ],
)
def test_values_have_one_spelling(spec: ArgSpec, value: str, canonical: str) -> None:
    assert canonical_arg(spec, value) == canonical
    assert canonical_arg(spec, canonical) == canonical


@pytest.mark.parametrize(
    ("spec", "value", "says"),
    [
        (ArgSpec("n", ArgType.INT, 1, 10), "0", "at least 1"),
        (ArgSpec("n", ArgType.INT, 1, 10), "11", "at most 10"),
        (ArgSpec("n", ArgType.INT), "1.0", "whole"),
        (ArgSpec("n", ArgType.INT), "٣", "whole"),
        (ArgSpec("n", ArgType.INT), "9" * 5000, "whole"),
        (ArgSpec("n", ArgType.INT), "1\n", "whole"),
        (ArgSpec("x", ArgType.FLOAT), "inf", "decimal"),
        (ArgSpec("x", ArgType.FLOAT), "", "decimal"),
        (ArgSpec("b", ArgType.BOOL), "True", "true or false"),
        (ArgSpec("s", ArgType.STR, choices=("a", "b")), "c", "a, b"),
        (ArgSpec("s", ArgType.STR), "", "one character"),
        (ArgSpec("s", ArgType.STR), "a\x1b[0m", "printable"),
        (ArgSpec("j", ArgType.JSON), "{'a': 1}", "JSON"),
        (ArgSpec("j", ArgType.JSON), "[" * 100_000, "JSON"),
        (ArgSpec("j", ArgType.JSON), "NaN", "JSON"),
    ],
)
def test_values_of_another_type_say_what_to_write(spec: ArgSpec, value: str, says: str) -> None:
    with pytest.raises(BadArg, match=says):
        canonical_arg(spec, value)


def test_advice_for_one_name_and_for_none() -> None:
    assert one_of("x", ["only"]) == "only"
    assert one_of("x", []) == "none: nothing is defined yet"
