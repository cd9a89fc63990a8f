"""Bodies of requests to the API server."""

from __future__ import annotations

import json
import re
from typing import Any

# What YAML reads otherwise than JSON when it stands raw within quotes: controls, line separators, byte order mark.
_YAML_MINDS = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def to_body(obj: Any) -> bytes:
    """JSON that means the same when it is read as YAML, as server-side apply reads it.

    Plain `json.dumps` escapes an emoji as a surrogate pair, which the API server's YAML reader refuses with 400;
    without escapes it refuses control characters and turns U+0085 and U+2028 into line breaks.
    """
    text = json.dumps(obj, ensure_ascii=False, separators=(",", ":"))
    return _YAML_MINDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()
