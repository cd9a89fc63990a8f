"""The contract kv_cache where contracts are listed."""

from __future__ import annotations

import pytest

from omni_runtime.deploy.edges import largest_chunk_bytes
from omni_runtime.deploy.plan import EdgePlan
from omni_runtime.topology.types import KV_CHUNK_BYTES, EngineKind, PayloadContract
from tests.unit.stages.plans import stage_plan


@pytest.mark.parametrize("mode", ["asyncChunk", "fullPayload"])
@pytest.mark.parametrize("payload", list(PayloadContract))
def test_every_contract_has_a_size(payload: PayloadContract, mode: str) -> None:
    """An arena is sized by it; a cache goes in chunks of a known size, whatever the model."""
    edge = EdgePlan("a", "b", payload, mode, "TCP", 1, 1, 0)
    need = largest_chunk_bytes(edge, stage_plan("a", EngineKind.AR_VLLM))
    assert need == KV_CHUNK_BYTES if payload is PayloadContract.KV_CACHE else need > 0
