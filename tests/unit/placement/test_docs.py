"""docs/placement.md shows what the program prints now."""

from __future__ import annotations

from scripts.placement_docs import PAGE, generated


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert generated(page) == page, "run python -m scripts.placement_docs"
