from __future__ import annotations

from decimal import Decimal

import pytest

from omni_runtime.deploy.quantity import format_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2", Decimal(2)),
        ("500m", Decimal("0.5")),
        ("1.5Gi", Decimal(3 << 29)),
        ("1k", Decimal(1000)),
        ("1Ei", Decimal(1 << 60)),
    ],
)
def test_reads_what_kubernetes_reads(text: str, number: Decimal) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize("text", ["", "Gi", "1e3", "-1", "1 Gi", "1gi", "1.Gi"])
def test_refuses_the_rest(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 4_210_688, (4 << 30) + 1, 10**15])
def test_advice_is_never_too_small(count: int) -> None:
    assert count <= parse_quantity(format_bytes(count)) <= count + max(1024, count // 2)
