"""Where metrics are read from, as a profile says it. Pure; the autoscaler and admission share it."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_prometheus_url(given: str) -> bool:
    """http or https, a host, and nothing after the path: the query is the reader's."""
    try:
        parts = urlsplit(given)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        return False
