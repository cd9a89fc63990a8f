"""An engine as a process of its own, so that it can be killed: `engine_process.py IPC_DIR PLAN ROLE REQUEST CHUNKS SIZE
[NODE_DIR]`. SIGUSR1 makes it fail with an exception.

producer: puts CHUNKS chunks of 200,000 bytes, prints "ready", puts nothing more.
line: prints "ready", then puts CHUNKS chunks of 2,000 bytes, all but the first on the line, and nothing more.
ending: as `line`, but it puts all after the first once it has read a line from stdin, ends the stream and prints "ended".
steady: puts CHUNKS of FULL chunks of SIZE bytes, prints "ready", and puts the others once it has read a line from stdin.
reader: as `consumer`, but it goes on until the stream has ended, and prints how many chunks there were.
consumer: reads a Producer from stdin, opens, takes and holds CHUNKS chunks, prints "ready", takes nothing more.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np

from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.deploy.plan import ResolvedPlan, load_plan
from omni_runtime.protocol.channels import load_keys
from omni_runtime.protocol.control import Producer
from tests.unit.connectors.kit import EDGE, a_chunk, has_line, rows, some_bytes, take, until

FULL = 12  # chunks of a stream that comes to its end
SIZES = {"producer": 200_000}


async def main(
    ipc_dir: Path, plan: ResolvedPlan, node: NodeFolder | None, role: str, request: str, chunks: int, size: int
) -> None:
    loop = asyncio.get_running_loop()
    failing = loop.create_future()
    loop.add_signal_handler(signal.SIGUSR1, lambda: failing.set_exception(RuntimeError("a fault of the engine")))
    client = SidecarEdgeClient(ipc_dir, plan, role, f"{role}-process", node=node)
    await client.connect(20)
    held = []
    if role not in ("consumer", "reader"):
        for n in range(chunks if role in ("producer", "steady") else 0):
            await client.put(request, EDGE, rows(some_bytes(SIZES.get(role, size), n), start=n))
        producer = Producer(EDGE, role, f"{role}-process", client.data_endpoint, client.shared_memory_domain)
        print(msgspec.json.encode(producer).decode(), flush=True)
    else:
        line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await client.open(request, msgspec.json.decode(line, type=Producer))
        held = await take(client, chunks)
    print("ready", len(held), flush=True)
    for n in range(chunks if role in ("line", "ending") else 0):
        finished = role == "ending" and n == chunks - 1
        await client.put(request, EDGE, rows(some_bytes(2_000, n), start=n, finished=finished))
        if n == 0 or role == "line":
            await until(lambda: has_line(client, request))
        if n == 0 and role == "ending":
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if role == "ending":
        print("ended", flush=True)
    if role == "steady":
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for n in range(chunks, FULL):
            await client.put(request, EDGE, rows(some_bytes(size, n), start=n, finished=n == FULL - 1))
    if role == "reader":
        del held
        while chunks < FULL:
            event = await a_chunk(client)
            assert np.array_equal(event.payload.tensors["rows"], some_bytes(size, chunks)), chunks
            chunks += 1
            del event
        print("took", chunks, flush=True)
    await failing


if __name__ == "__main__":
    ipc_dir, plan = Path(sys.argv[1]), Path(sys.argv[2])
    node = NodeFolder(Path(sys.argv[7]), load_keys(plan.parent / "curve")) if len(sys.argv) > 7 else None
    asyncio.run(main(ipc_dir, load_plan(plan.read_bytes()), node, *sys.argv[3:5], *map(int, sys.argv[5:7])))
