"""Who gets how many accelerators when the cluster has fewer than its pipelines want. Pure.

Max-min fair: a tenant that wants less than its share gets what it wants, and the rest is divided by weight; within a
tenant pipelines are equal. A namespace without a tenant is one of its own, with weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What a pipeline wants of one kind of accelerator. floor: what its minReplicas take, which nobody takes away."""

    pipeline: str
    tenant: str
    weight: int
    wants: int
    floor: int = 0


def fair_shares(claims: Sequence[Claim], capacity: int) -> dict[str, int]:
    """Pipeline -> accelerators that it may have; empty while there are enough for all."""
    if sum(c.wants for c in claims) <= capacity:
        return {}
    shares = {c.pipeline: min(c.floor, c.wants) for c in claims}
    weights = {c.tenant: c.weight for c in claims}
    held = {tenant: sum(shares[c.pipeline] for c in claims if c.tenant == tenant) for tenant in weights}
    left = capacity - sum(shares.values())
    while left > 0:
        wanting = [c for c in claims if shares[c.pipeline] < c.wants]
        if not wanting:
            break
        # Names break ties, so that the same claims always give the same shares.
        next_one = min(
            wanting, key=lambda c: (held[c.tenant] / weights[c.tenant], c.tenant, shares[c.pipeline], c.pipeline)
        )
        shares[next_one.pipeline] += 1
        held[next_one.tenant] += 1
        left -= 1
    return shares
