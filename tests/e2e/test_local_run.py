"""`omni run`: a pipeline without a cluster, from the command line to the spoken answer, a crash and the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_runtime.client import ask
from omni_runtime.errors import ReplicaLost
from omni_runtime.local.process import group_members
from tests.e2e.local_run import SMOL_OMNI, LocalRun, wait_for

pytestmark = pytest.mark.timeout(900)

QUESTION = "Why is the sky blue? Answer in two short sentences."


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    with LocalRun(tmp_path_factory.mktemp("run"), SMOL_OMNI) as run:
        yield run


def test_a_spoken_answer_streams(local: LocalRun) -> None:
    answer = ask(local.url, QUESTION)
    assert answer.text.strip()
    assert answer.audio_s > 1.0
    assert answer.finish_reason == "stop"
    assert answer.ttfp_s < answer.e2e_s


def test_equal_questions_sound_equal(local: LocalRun) -> None:
    """R27, R25: greedy and concurrent; no request hears another's rows."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(local.url, QUESTION), range(4)))
    for answer in answers[1:]:
        assert answer.text == answers[0].text
        assert answer.pcm.tobytes() == answers[0].pcm.tobytes()


def test_a_killed_stage_is_named_and_comes_back(local: LocalRun) -> None:
    """T69, R34, R35: text goes on, speech returns alone, the lost request hears why."""
    victim = next(pid for pid, command in local.children().items() if "--stage code2wav" in command)

    def on_text(_: str) -> None:
        if victim in local.children() and local.missing() == []:  # once: it may be back before the text ends
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: local.missing() == ["code2wav"], 10, "the loss")

    with pytest.raises(ReplicaLost, match="stage code2wav"):
        ask(local.url, "Tell me a long story about the sea.", on_text=on_text, max_tokens=200, ignore_eos=True)
    assert ask(local.url, "Name one colour.", modalities=("text",)).text.strip()
    wait_for(lambda: local.missing() == [], 120, "the return")
    assert local.printed("code2wav ended (killed by signal 9)")
    assert ask(local.url, QUESTION).audio_s > 1.0


def test_stop_leaves_no_process_and_no_memory(local: LocalRun) -> None:
    """R11, R12: neither processes, nor sockets, nor shared memory."""
    pids = list(local.children())
    everyone = [member for pid in pids for member in group_members(pid)]
    mapped = {line.split(maxsplit=5)[5] for pid in everyone for line in _maps(pid) if "/dev/shm/" in line}
    local.process.send_signal(signal.SIGTERM)
    assert local.process.wait(120) == 0
    assert local.printed("stopped")
    # An orphan that has ended stays in /proc until init reaps it; group_members does not count it.
    assert [member for pid in pids for member in group_members(pid)] == []
    assert not [path for path in mapped if Path(path).exists()]


def _maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
