from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.connectors.kit import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def fast_collections() -> Iterator[None]:
    """Tests here collect garbage to see who still holds a slab; torch, loaded by others, made that half a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
