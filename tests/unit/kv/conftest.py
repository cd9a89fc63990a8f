from __future__ import annotations

from tests.unit.connectors.conftest import fast_collections, site

__all__ = ["fast_collections", "site"]
