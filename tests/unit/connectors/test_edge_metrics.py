"""What a sidecar counts of its edges."""

from __future__ import annotations

from tests.unit.connectors.kit import (
    EDGE,
    MODES,
    Site,
    a_pair,
    producer,
    put_many,
    rows,
    some_bytes,
    take,
    until,
    whole_stream,
)


@MODES
async def test_metrics_name_the_edge(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        await pair.down.open("r", producer(pair.up))
        await put_many(pair.up, "r", 3, 100_000)
        await whole_stream(pair.down)
        text = pair.hosts[0].sidecar.metrics.render().decode()
        connector = "SharedMemory" if mode == "same pod" else "TCP"
        labels = 'from_replica="thinker-0",from_stage="thinker",model_name="x",to_replica="talker-0",to_stage="talker"'
        assert f'omni:connector_bytes_total{{connector="{connector}",{labels}}} 300000.0' in text
        assert f"vllm_omni:transfer_size_bytes_count{{{labels}}} 3.0" in text
        assert f"vllm_omni:transfer_tx_s_count{{{labels}}} 3.0" in text
        there = pair.hosts[-1].sidecar.metrics.render().decode()
        assert f"vllm_omni:transfer_in_flight_s_count{{{labels}}} 3.0" in there


async def test_metrics_tell_which_edge_stands_still(site: Site) -> None:
    async with a_pair(site, "same pod") as pair:
        for n in range(3):
            await pair.up.put("r", EDGE, rows(some_bytes(1000), start=n))
        await until(lambda: pair.hosts[0].sidecar.hub.table.queued_pieces == 3)
        labels = 'from_replica="thinker-0",from_stage="thinker",model_name="x",to_replica="",to_stage="talker"'
        text = pair.hosts[0].sidecar.metrics.render().decode()
        assert f"omni:connector_edge_stalled_streams{{{labels}}} 1.0" in text
        assert f"omni:connector_edge_waiting_pieces{{{labels}}} 3.0" in text
        await pair.down.open("r", producer(pair.up))
        await take(pair.down, 3)
        assert labels not in pair.hosts[0].sidecar.metrics.render().decode()
