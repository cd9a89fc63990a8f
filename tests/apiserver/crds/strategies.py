"""Random valid objects of each kind, derived from the schema of the models."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from omni_crds.crd import Kind, build_schema
from omni_crds.v1alpha1.base import API_VERSION, NO_CONTROLS
from tests.apiserver.crds.examples import RULES
from tests.apiserver.crds.patterns import PATTERNS

Schema = dict[str, Any]

# Stage names from a small pool, so that edges meet stages and rules about both come into play.
_POOLS: dict[str, list[str]] = {
    name: ["thinker", "talker", "code2wav", "a"]
    for name in ("name", "from", "to", "stageName", "colocatedWith", "podGroup")
} | {"topology": ["custom", "smol_omni", "qwen3_omni_moe"]}
# Long lists make slow tests, not better ones; the bounds themselves are tried in test_constraints.py.
_MOST_ITEMS = 4


@functools.cache
def objects(kind: Kind, part: str = "spec") -> st.SearchStrategy[Schema]:
    """Whole objects that have `spec`, or only the values of `status`."""
    values = _values(build_schema(kind)["properties"][part], part)
    if part == "status":
        return values
    head = {"apiVersion": API_VERSION, "kind": kind.name, "metadata": {"name": "x"}}
    return values.map(lambda spec: {**head, "spec": spec})


def _values(schema: Schema, name: str) -> st.SearchStrategy[Any]:
    made = _MAKERS[schema["type"]](schema, name)
    checks = schema.get("x-kubernetes-validations", ())
    # Twice: what one repair takes away may be what another one looks at.
    repairs = [RULES[check["message"]].repair for check in checks] * 2
    return (
        made.map(lambda value: functools.reduce(lambda node, repair: repair(node), repairs, value)) if repairs else made
    )


def _object(schema: Schema, name: str) -> st.SearchStrategy[Any]:
    if "additionalProperties" in schema:
        keys = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
        most = min(schema["maxProperties"], _MOST_ITEMS)
        return st.dictionaries(keys, _values(schema["additionalProperties"], name), max_size=most)
    fields = {field: _values(child, field) for field, child in schema["properties"].items()}
    required = {field: fields.pop(field) for field in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


def _array(schema: Schema, name: str) -> st.SearchStrategy[Any]:
    keys = schema.get("x-kubernetes-list-map-keys")
    unique: Callable[[Any], Any] | None = None
    if keys:
        unique = lambda item: tuple(item[key] for key in keys)  # noqa: E731
    elif schema["x-kubernetes-list-type"] == "set":
        unique = lambda item: item  # noqa: E731
    return st.lists(
        _values(schema["items"], name),
        min_size=schema.get("minItems", 0),
        max_size=min(schema["maxItems"], _MOST_ITEMS),
        unique_by=unique,
    )


def _string(schema: Schema, name: str) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    shortest, longest = schema.get("minLength", 0), schema["maxLength"]

    def fits(text: str) -> bool:
        return shortest <= len(text) <= longest

    if schema.get("pattern") in (None, NO_CONTROLS):
        controls = ["Cs"] if "pattern" not in schema else ["Cs", "Cc"]
        return st.text(st.characters(exclude_categories=controls), max_size=min(longest, 40), min_size=shortest)
    if (pool := _POOLS.get(name)) and all(re.search(schema["pattern"], word) for word in pool):
        return st.sampled_from(pool)
    examples = [text for text in PATTERNS[schema["pattern"]].accepted if fits(text)]
    body = re.compile(schema["pattern"].removeprefix("^").removesuffix("$"), re.ASCII)
    random = st.from_regex(body, fullmatch=True, alphabet=st.sampled_from(string.printable)).filter(fits)
    return st.sampled_from(examples) | random


def _integer(schema: Schema, name: str) -> st.SearchStrategy[Any]:
    return st.integers(schema["minimum"], schema["maximum"])


_MAKERS: dict[str, Callable[[Schema, str], st.SearchStrategy[Any]]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
}
