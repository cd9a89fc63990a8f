"""An engine as a process of its own, so that it can be killed: `engine_process.py IPC_DIR PLAN ROLE REQUEST CHUNKS
[NODE_DIR]`.

producer: puts CHUNKS chunks of 200,000 bytes, prints "ready", puts nothing more.
line: prints "ready", then puts CHUNKS chunks of 2,000 bytes, all but the first on the line, and nothing more.
ending: as `line`, but it puts all after the first once it has read a line from stdin, ends the stream and prints "ended".
consumer: reads a Producer from stdin, opens, takes and holds CHUNKS chunks, prints "ready", takes nothing more.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.deploy.plan import ResolvedPlan, load_plan
from omni_runtime.protocol.channels import load_keys
from omni_runtime.protocol.control import Producer
from tests.unit.connectors.kit import EDGE, has_line, rows, some_bytes, take, until


async def main(
    ipc_dir: Path, plan: ResolvedPlan, node: NodeFolder | None, role: str, request: str, chunks: int
) -> None:
    client = SidecarEdgeClient(ipc_dir, plan, role, f"{role}-process", node=node)
    await client.connect(20)
    held = []
    if role != "consumer":
        for n in range(chunks if role == "producer" else 0):
            await client.put(request, EDGE, rows(some_bytes(200_000, n), start=n))
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
    await asyncio.Event().wait()


if __name__ == "__main__":
    ipc_dir, plan = Path(sys.argv[1]), Path(sys.argv[2])
    node = NodeFolder(Path(sys.argv[6]), load_keys(plan.parent / "curve")) if len(sys.argv) > 6 else None
    asyncio.run(main(ipc_dir, load_plan(plan.read_bytes()), node, *sys.argv[3:5], int(sys.argv[5])))
