"""The request book: every input is accepted in every state, and each request ends in exactly one terminal."""

from __future__ import annotations

import numpy as np

from omni_runtime.connectors.api import ChunkReceived, EdgeFailed
from omni_runtime.protocol import control
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages import actions
from omni_runtime.stages import requests as book
from omni_runtime.stages.engine import AudioOut, Done, EdgeOut, Failed, Started, TextOut

UP, DOWN = "thinker->talker", "talker->code2wav"
ORCHESTRATOR = "orchestrator-1"


def a_book(**changes: object) -> book.RequestBook:
    values: dict[str, object] = {
        "stage": "talker",
        "capacity": 2,
        "chunk_deadline_s": 10.0,
        "patient_edges": frozenset(),
    }
    return book.RequestBook(**{**values, **changes})  # type: ignore[arg-type]


def a_submit(request: str = "r1", deadline: float = 100.0) -> control.Submit:
    producer = control.Producer(UP, "thinker", "replica-0", "tcp://h:1", "domain")
    return control.Submit(
        request=request, params={}, producers=(producer,), deadline_seconds=deadline, consumers=(DOWN,)
    )


def a_chunk(request: str = "r1", *, finished: bool = False, seq: int = 0) -> ChunkReceived:
    return ChunkReceived(
        request, UP, seq, Payload(start=seq, rows=1, finished=finished, tensors={"x": np.zeros(1)}), 0.25
    )


def an_edge_out(request: str = "r1", *, finished: bool = False) -> EdgeOut:
    return EdgeOut(request, DOWN, Payload(start=0, rows=0, finished=finished))


def messages(todo: tuple[actions.Action, ...]) -> list[control.StageMessage]:
    return [a.message for a in todo if isinstance(a, actions.Send)]


def test_a_request_from_submit_to_finish() -> None:
    b = a_book()
    start, opened = b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    assert isinstance(start, actions.StartEngine)
    assert start.request.upstream_edges == (UP,)
    assert start.request.downstream_edges == (DOWN,)
    assert isinstance(opened, actions.OpenEdge)
    assert isinstance(b.chunk(a_chunk(finished=True), now=2.0)[0], actions.Feed)
    assert messages(b.output(Started("r1"), now=3.0)) == [
        control.StageStarted(request="r1", queue_seconds=1.0, transfer_seconds=0.25)
    ]
    assert isinstance(b.output(an_edge_out(finished=True), now=4.0)[0], actions.Put)
    assert b.output(Done("r1", "stop", frames=7), now=5.0) == (), "not finished while a chunk waits for its consumer"
    send, cleanup = b.put_done("r1", DOWN)
    assert cleanup == actions.CleanupEdges("r1")
    assert send == actions.Send(
        ORCHESTRATOR,
        control.StageFinished(
            request="r1", finish_reason="stop", frames=7, queue_seconds=1.0, compute_seconds=2.0, transfer_seconds=0.25
        ),
    )
    assert b.idle


def test_a_stage_that_is_taken_before_its_rows_starts_with_them() -> None:
    """Waiting for upstream is neither queue nor compute of this stage: the shares of the TTFP would be wrong."""
    b = a_book()
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    assert b.output(Started("r1"), now=1.0) == ()
    assert (b.waiting, b.running) == (0, 1)
    assert messages(b.chunk(a_chunk(), now=5.0)) == [
        control.StageStarted("r1", queue_seconds=0.0, transfer_seconds=0.25)
    ]
    assert messages(b.chunk(a_chunk(seq=1, finished=True), now=6.0)) == []
    (finished,) = messages(b.output(Done("r1", "stop"), now=7.0))
    assert isinstance(finished, control.StageFinished)
    assert (finished.queue_seconds, finished.compute_seconds) == (0.0, 2.0)


def test_what_has_rows_and_is_not_taken_waits() -> None:
    b = a_book()
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    assert b.waiting == 0
    b.chunk(a_chunk(), now=1.0)
    assert b.waiting == 1
    b.output(Started("r1"), now=2.0)
    assert b.waiting == 0


def test_a_consumer_that_is_done_early_does_not_fail_its_producer() -> None:
    b = a_book()
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    b.output(an_edge_out(), now=1.0)
    assert b.put_closed("r1", DOWN) == ()
    assert b.output(an_edge_out(), now=2.0) == (), "nobody reads: not put"
    assert isinstance(messages(b.output(Done("r1", "stop"), now=3.0))[0], control.StageFinished)


def test_silence_upstream_fails_with_the_edge_named_r5() -> None:
    b = a_book()
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    b.chunk(a_chunk(), now=5.0)
    assert b.tick(now=14.0) == ()
    send, stop = b.tick(now=15.0)
    assert isinstance(send, actions.Send)
    assert isinstance(send.message, control.StageFailed)
    assert send.message.code == "DeadlineExceeded"
    assert UP in send.message.message
    assert stop == actions.StopEngine("r1")
    assert b.engine_stopped("r1") == (actions.AbortEdges("r1"),)


def test_silence_is_normal_on_a_full_payload_edge_r1() -> None:
    b = a_book(patient_edges=frozenset({UP}))
    b.submit(a_submit(deadline=50.0), ORCHESTRATOR, now=0.0)
    assert b.tick(now=40.0) == ()
    (failed,) = messages(b.tick(now=50.0))
    assert isinstance(failed, control.StageFailed)
    assert "upstream not finished: thinker->talker" in failed.message


def test_a_finished_edge_may_be_silent() -> None:
    b = a_book()
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    b.chunk(a_chunk(finished=True), now=1.0)
    assert b.tick(now=90.0) == ()


def test_abort_is_answered_in_every_state_r16() -> None:
    b = a_book()
    assert messages(b.abort("unknown", ORCHESTRATOR)) == [control.Aborted(request="unknown")]
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    assert b.abort("r1", ORCHESTRATOR) == (actions.StopEngine("r1"),)
    assert b.abort("r1", ORCHESTRATOR) == (), "one answer, when the engine has let go"
    assert b.output(TextOut("r1", "late"), now=1.0) == ()
    assert b.output(Done("r1", "stop"), now=1.0) == ()
    assert b.chunk(a_chunk(), now=1.0) == ()
    assert b.engine_stopped("r1") == (
        actions.AbortEdges("r1"),
        actions.Send(ORCHESTRATOR, control.Aborted(request="r1")),
    )
    assert b.idle


def test_an_ended_id_cannot_start_again_r4() -> None:
    b = a_book()
    b.submit(a_submit(), ORCHESTRATOR, now=0.0)
    assert b.submit(a_submit(), ORCHESTRATOR, now=0.0) == (), "double"
    b.abort("r1", ORCHESTRATOR)
    assert b.submit(a_submit(), ORCHESTRATOR, now=0.0) == (), "being stopped"
    b.engine_stopped("r1")
    assert b.submit(a_submit(), ORCHESTRATOR, now=0.0) == (), "over"


def test_late_and_unknown_events_are_dropped() -> None:
    b = a_book()
    assert b.chunk(a_chunk("x"), now=0.0) == ()
    assert b.edge_failed(EdgeFailed("x", UP, "UpstreamLost", "gone")) == ()
    assert b.put_done("x", DOWN) == ()
    assert b.put_failed("x", DOWN, "DeadlineExceeded", "m") == ()
    assert b.output(AudioOut("x", b"", 24000, 0), now=0.0) == ()
    assert b.engine_stopped("x") == ()


def test_one_request_fails_the_others_go_on_r34() -> None:
    b = a_book()
    b.submit(a_submit("r1"), ORCHESTRATOR, now=0.0)
    b.submit(a_submit("r2"), ORCHESTRATOR, now=0.0)
    (failed,) = messages(b.output(Failed("r1", "CapacityExceeded", "too long"), now=1.0))
    assert failed == control.StageFailed(request="r1", code="CapacityExceeded", message="stage talker: too long")
    assert b.knows("r2")


def test_a_dead_engine_tells_everybody_r8() -> None:
    b = a_book()
    b.submit(a_submit("r1"), ORCHESTRATOR, now=0.0)
    b.submit(a_submit("r2"), ORCHESTRATOR, now=0.0)
    assert {m.request for m in messages(b.engine_failed("out of memory")) if isinstance(m, control.StageFailed)} == {
        "r1",
        "r2",
    }


def test_a_draining_replica_takes_nothing_new() -> None:
    b = a_book()
    b.submit(a_submit("r1"), ORCHESTRATOR, now=0.0)
    b.drain()
    (failed,) = messages(b.submit(a_submit("r2"), ORCHESTRATOR, now=0.0))
    assert isinstance(failed, control.StageFailed)
    assert failed.code == "StageUnavailable"
    assert not b.idle
    b.output(Done("r1", "stop"), now=1.0)
    assert b.idle


def test_a_lost_orchestrator_takes_only_its_requests_along() -> None:
    b = a_book()
    b.submit(a_submit("r1"), "o1", now=0.0)
    b.submit(a_submit("r2"), "o2", now=0.0)
    assert b.orchestrator_lost("o1") == (actions.StopEngine("r1"),)
    assert b.engine_stopped("r1") == (actions.AbortEdges("r1"),)
    assert b.knows("r2")


def test_a_flood_is_refused_with_numbers() -> None:
    b = a_book(capacity=1)
    for i in range(4):
        b.submit(a_submit(f"r{i}"), ORCHESTRATOR, now=0.0)
    (failed,) = messages(b.submit(a_submit("r9"), ORCHESTRATOR, now=0.0))
    assert isinstance(failed, control.StageFailed)
    assert failed.code == "CapacityExceeded"
