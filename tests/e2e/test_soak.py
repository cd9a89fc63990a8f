"""Ten minutes of everything at once: random requests and clients that leave, while replicas are killed (R6, R11, R34).

Nothing hangs, nothing grows, and the clients' books agree with the server's.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.exactness import Prompt, Question, body_of, expected_of, heard_of, row_of
from tests.e2e.local_run import SMOL_OMNI, LocalRun, wait_for
from tests.e2e.soak import DEADLINE_SECONDS, Books, Client, Plan, random_plan
from tests.e2e.test_exact_under_load import tiny_pipeline
from tests.unit.stages.qwen3_reference import Reference, tiny_model_path

pytestmark = [pytest.mark.timeout(1500), pytest.mark.engine, pytest.mark.long]

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))  # of each of the two pipelines
CLIENTS = 8
KILL_EVERY_SECONDS = 15.0
SAMPLE_SECONDS = 5.0
GROWTH_BYTES = 24 << 20  # of a process from the second quarter to the last: pools that fill are no leak


def test_smol_omni(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SMOL_OMNI, "--replicas", "talker=2", "--replicas", "code2wav=2") as run:
        soak(run, speaks_text=True)


def test_qwen3_omni_tiny(tmp_path: Path) -> None:
    """Here whole answers are compared as well: what came through a loss is right, or it is an error."""
    reference = Reference(tiny_model_path())
    exact = [exact_plan(Question(Prompt(n), audio=n % 3 != 2), reference) for n in range(6)]
    with LocalRun(tmp_path, tiny_pipeline(tmp_path), "--replicas", "talker=2", "--replicas", "code2wav=2") as run:
        soak(run, speaks_text=False, exact=exact)


def exact_plan(question: Question, reference: Reference) -> Plan:
    want = expected_of(question, reference)

    def check(answer: dict[str, object]) -> str:
        row = row_of(question, heard_of(answer), want, reference)
        return "" if row.exact else str(row)

    return Plan("/v1/chat/completions", body_of(question) | {"timeout_seconds": DEADLINE_SECONDS}, check=check)


def soak(run: LocalRun, *, speaks_text: bool, exact: Sequence[Plan] = ()) -> None:
    books, lock, stop = Books(), threading.Lock(), threading.Event()
    shared_before = set(os.listdir("/dev/shm"))
    threads = []
    for number in range(CLIENTS):
        rng = random.Random(number)
        client = Client(run.url, books, lock, stop)

        def go(client: Client = client, rng: random.Random = rng) -> None:
            client.run(lambda: random_plan(rng, speaks_text=speaks_text, exact=exact))

        threads.append(threading.Thread(target=go, daemon=True))
    for thread in threads:
        thread.start()
    sizes, kills = trouble(run, books, lock)
    stop.set()
    for thread in threads:
        thread.join(120)
    print(f"{books.sent} requests: {books.complete} complete, {books.left} left, {dict(books.told)}; {kills} kills")
    assert not any(t.is_alive() for t in threads), "a client hangs"
    assert books.strange == []
    assert books.ended == books.sent
    assert books.slowest < DEADLINE_SECONDS + 15, "later than its deadline"
    assert books.complete > 0.2 * books.sent, "most of what could end well did not"
    wait_for(lambda: busy(run) == {}, 60, f"nothing is held: {busy(run)}")
    agree(run, books)
    assert kills >= SECONDS / KILL_EVERY_SECONDS / 2
    for process, resident in sizes.items():
        grown = float(
            np.mean(resident[-(len(resident) // 4) :]) - np.mean(resident[len(resident) // 4 :][: len(resident) // 4])
        )
        assert grown < GROWTH_BYTES, f"{process} grew by {grown / (1 << 20):.1f} MiB: {resident}"
    wait_for(lambda: run.missing() == [], 180, "every stage is back")
    own = [n for n in set(os.listdir("/dev/shm")) - shared_before if not n.startswith(("psm_", "sem."))]
    assert len(own) <= 2, f"shared memory of killed processes is left: {own}"


def trouble(run: LocalRun, books: Books, lock: threading.Lock) -> tuple[dict[str, list[int]], int]:
    """Kill replicas of talker and code2wav in turn, the thinker once; memory of the processes that live through it.

    Only what is ready is killed: `omni run` ends, and says so, when a process ends three times before it was ready.
    """
    rng = random.Random(0)
    started = time.monotonic()
    kills, thinker_killed = 0, False
    sizes: dict[str, list[int]] = {"entry": [], "connector": []}
    pause = threading.Event()  # never set: a wait with a deadline, between two looks
    while (elapsed := time.monotonic() - started) < SECONDS:
        assert run.process.poll() is None, run.output.read_text()[-2000:]
        for name, resident in sizes.items():
            resident.append(rss_of(next(iter(pids(run, name)))))
        if elapsed >= KILL_EVERY_SECONDS * (kills + 1):
            stage = rng.choice(("talker", "code2wav"))
            if not thinker_killed and elapsed > SECONDS / 2:
                stage = "thinker"
            if victims := run.ready(stage):
                os.kill(rng.choice(victims), signal.SIGKILL)
                kills += 1
                thinker_killed |= stage == "thinker"
        with lock:
            assert books.strange == []
        pause.wait(SAMPLE_SECONDS)
    return sizes, kills


def agree(run: LocalRun, books: Books) -> None:
    """The server's count of ends is the clients' count of requests. A client that left may have missed a good end."""
    text = httpx.get(f"{run.url}/metrics", timeout=10).text
    success, failed, refused = (
        total(text, f"{family}_total")
        for family in ("vllm_omni:requests_success", "vllm_omni:requests_failed", "omni:requests_refused")
    )
    assert success + failed + refused == books.sent, (success, failed, refused, books)
    assert 0 <= success - books.complete <= books.left, (success, books)
    assert 0 <= failed - books.told.total() <= books.left, (failed, books)


def busy(run: LocalRun) -> dict[str, float]:
    held = {
        "running": ("entry", "vllm_omni:num_requests_running"),
        "waiting": ("entry", "vllm_omni:num_requests_waiting"),
        "arena": ("connector", "omni:connector_arena_used_bytes"),
        "streams": ("connector", "omni:connector_streams"),
        **{stage: (stage, "omni:stage_running_requests") for stage in ("thinker", "talker", "code2wav")},
    }
    try:
        found = {name: sum(run.metric(process, family)) for name, (process, family) in held.items()}
    except (httpx.HTTPError, AssertionError) as error:  # a process that starts
        return {str(error): 1.0}
    return {name: value for name, value in found.items() if value}


def total(exposition: str, sample: str) -> int:
    lines = (line.rsplit(" ", 1) for line in exposition.splitlines() if line.startswith(f"{sample}{{"))
    return round(sum(float(value) for _, value in lines))


def pids(run: LocalRun, process: str) -> Iterable[int]:
    mark = run.mark_of(process)
    return (pid for pid, command in run.children().items() if mark in command)


def rss_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10
