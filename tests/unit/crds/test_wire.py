"""A body means the same as JSON and as YAML: server-side apply reads YAML."""

from __future__ import annotations

import json

import yaml
from hypothesis import given
from hypothesis import strategies as st

from omni_crds.wire import to_body


@given(st.text() | st.text(alphabet='a\x00\x1b\x7f\x85\x9f\u2028\u2029\ufeff\ufffe\uffff🙂\n\t"\\'))
def test_reads_the_same_as_json_and_as_yaml(text: str) -> None:
    body = to_body({"value": text})
    assert json.loads(body) == {"value": text}
    assert yaml.safe_load(body) == {"value": text}


def test_emoji_is_no_surrogate_pair() -> None:
    """The API server answers 400 "found invalid Unicode character escape code"."""
    assert b"\\u" not in to_body("🙂")
