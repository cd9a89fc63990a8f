"""The stream machine: order, windows, ends; a hypothesis state machine against a simple model."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from omni_runtime.connectors.streams import (
    Action,
    Count,
    Deliver,
    Drop,
    Fail,
    Grant,
    Key,
    Limits,
    Piece,
    Port,
    StreamTable,
)
from omni_runtime.connectors.tensors import ChunkHeader
from omni_runtime.connectors.wire import WINDOW_PIECES, Put

KEY = Key("thinker-0", "thinker->talker", "r")
P, C = Port(1, 1), Port(2, 1)


def piece(seq: int, *, finished: bool = False, number: int = 0, last: bool = True) -> Piece:
    chunk = ChunkHeader(seq, 1, finished, 0, 0.0) if number == 0 else None
    return Piece(Put(1, seq, number, last, 0, None, chunk), b"")


def delivered(actions: list[Action]) -> list[int]:
    return [a.piece.put.seq for a in actions if isinstance(a, Deliver)]


def failures(actions: list[Action]) -> list[tuple[Port, str]]:
    return [(a.port, a.code) for a in actions if isinstance(a, Fail)]


@pytest.fixture
def table() -> StreamTable:
    return StreamTable(Limits(lease_seconds=10, streams_per_session=4))


def test_the_consumer_may_come_first_or_last(table: StreamTable) -> None:
    other = Key("thinker-0", "thinker->talker", "s")
    table.open(C, KEY, "t", 8, 0)
    table.bind(P, KEY, 0)
    assert delivered(table.put(P, piece(0, finished=True), 0)) == [0]
    table.bind(Port(1, 2), other, 0)
    assert table.put(Port(1, 2), piece(0, finished=True), 0) == []
    assert delivered(table.open(Port(2, 2), other, "t", 8, 0)) == [0]
    assert len(table) == 0


def test_credits_hold_the_producer_back(table: StreamTable) -> None:
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 2, 0)
    sent = [seq for n in range(5) for seq in delivered(table.put(P, piece(n), 0))]
    assert sent == [0, 1]
    actions = table.credit(C, 2, 0)
    assert delivered(actions) == [2, 3]
    assert Grant(P, 2) in actions
    assert table.stalled == 1


def test_a_producer_that_ignores_its_window_is_cut_off(table: StreamTable) -> None:
    table.bind(P, KEY, 0)
    for n in range(WINDOW_PIECES):
        assert table.put(P, piece(n), 0) == []
    actions = table.put(P, piece(WINDOW_PIECES), 0)
    assert failures(actions) == [(P, "ProtocolError")]
    assert sum(isinstance(a, Drop) for a in actions) == WINDOW_PIECES + 1


@pytest.mark.parametrize("wrong", [piece(2), piece(0), piece(1, number=1)], ids=["gap", "duplicate", "piece gap"])
def test_gaps_and_duplicates_end_the_stream_at_both_ends(table: StreamTable, wrong: Piece) -> None:
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 8, 0)
    table.put(P, piece(0), 0)
    assert failures(table.put(P, wrong, 0)) == [(P, "ProtocolError"), (C, "ProtocolError")]


def test_an_ended_request_cannot_be_resurrected(table: StreamTable) -> None:
    """R4, R26: neither by a late chunk nor by a late open nor by the same id again."""
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 8, 0)
    assert failures(table.cancel(C, "abort")) == [(P, "StreamClosed")]
    assert table.put(P, late := piece(0), 0) == [Drop(late)]
    assert failures(table.bind(Port(1, 9), KEY, 0)) == [(Port(1, 9), "StreamClosed")]
    assert failures(table.open(Port(2, 9), KEY, "t", 8, 0)) == [(Port(2, 9), "StreamClosed")]
    assert len(table) == 0


def end_many(table: StreamTable, first: int, count: int) -> None:
    for n in range(first, first + count):
        port = Port(1, 100)
        table.bind(port, Key("thinker-7f9c4-x2x5q", "thinker->talker", f"req-{n:032x}"), 0)
        table.cancel(port, "abort")


def test_so_many_ended_streams_are_remembered() -> None:
    table = StreamTable(Limits(remembered=50))
    table.bind(P, KEY, 0)
    table.cancel(P, "abort")
    end_many(table, 0, 50)
    assert failures(table.bind(P, KEY, 0)) == [(P, "StreamClosed")]
    end_many(table, 50, 50)
    assert table.bind(P, KEY, 0) == []


def test_what_is_remembered_of_ended_streams_is_small() -> None:
    """A sidecar lives for months."""
    table = StreamTable(Limits(remembered=1 << 20))
    end_many(table, 0, 1000)
    tracemalloc.start()
    end_many(table, 1000, 20_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / 20_000 < 200


def test_a_second_consumer_is_refused(table: StreamTable) -> None:
    table.open(C, KEY, "t", 8, 0)
    assert failures(table.open(Port(3, 1), KEY, "u", 8, 0)) == [(Port(3, 1), "StreamClosed")]


def test_what_a_dead_producer_had_finished_still_arrives(table: StreamTable) -> None:
    """R6, R23: the tail is not lost because its producer has left."""
    table.bind(P, KEY, 0)
    table.put(P, piece(0), 0)
    table.put(P, piece(1, finished=True), 0)
    assert table.session_lost(1, "gone") == []
    assert delivered(table.open(C, KEY, "t", 8, 0)) == [0, 1]


def test_a_dead_producer_in_mid_stream_is_told_to_the_consumer(table: StreamTable) -> None:
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 0 + 1, 0)
    table.put(P, piece(0), 0)
    table.put(P, piece(1), 0)
    actions = table.session_lost(1, "killed")
    assert failures(actions) == [(C, "UpstreamLost")]
    assert sum(isinstance(a, Drop) for a in actions) == 1


def test_a_dead_consumer_frees_the_producer(table: StreamTable) -> None:
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 8, 0)
    assert failures(table.session_lost(2, "killed")) == [(P, "StreamClosed")]


def test_the_janitor_ends_orphans_and_spares_the_moving(table: StreamTable) -> None:
    """R11, R12: a stream that nobody opens does not stay for ever."""
    moving = Key("thinker-0", "thinker->talker", "moving")
    table.bind(P, KEY, 0)
    table.put(P, piece(0), 0)
    table.bind(Port(1, 2), moving, 0)
    table.put(Port(1, 2), piece(0), 9)
    actions = table.tick(11)
    assert failures(actions) == [(P, "DeadlineExceeded")]
    assert len(table) == 1


def test_a_session_cannot_hold_any_number_of_streams(table: StreamTable) -> None:
    codes = [failures(table.open(Port(2, n), Key("p", "a->b", str(n)), "t", 1, 0)) for n in range(5)]
    assert codes[:4] == [[]] * 4
    assert codes[4] == [(Port(2, 4), "CapacityExceeded")]


SENT = ((1000, 0.001), (2000, 0.002))


def a_stream_with_a_line(table: StreamTable) -> None:
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 8, 0, token=7)


def test_the_line_is_known_once_both_ends_are_there(table: StreamTable) -> None:
    table.open(C, KEY, "t", 8, 0, token=7)
    assert table.line(C) is None
    table.bind(P, KEY, 0)
    assert table.line(P) == table.line(C) == (P, C, 7)
    table.open(Port(2, 2), other := Key("thinker-0", "thinker->talker", "s"), "t", 8, 0)
    table.bind(Port(1, 2), other, 0)
    assert table.line(Port(1, 2)) is None, "a consumer without a line"


def test_chunks_that_went_past_the_sidecar_count_as_put(table: StreamTable) -> None:
    a_stream_with_a_line(table)
    assert table.bypassed(P, SENT, 0) == [Count(C, KEY, "t", SENT)]
    assert delivered(table.put(P, piece(2), 0)) == [2]
    assert table.taken(C, 2, 0) == [Grant(P, 2)]
    assert delivered(table.put(P, piece(3, finished=True), 0)) == [3]
    assert len(table) == 0
    assert table.bypassed(P, SENT, 0) == table.taken(C, 2, 0) == []


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_a_gap_or_repetition_after_them_is_seen(table: StreamTable, seq: int) -> None:
    a_stream_with_a_line(table)
    table.bypassed(P, SENT, 0)
    assert failures(table.put(P, piece(seq), 0)) == [(P, "ProtocolError"), (C, "ProtocolError")]


def test_chunks_that_cannot_have_gone_past_end_the_stream(table: StreamTable) -> None:
    """No line, in the middle of a chunk, after the last one."""
    table.bind(P, KEY, 0)
    table.open(C, KEY, "t", 8, 0)
    assert failures(table.bypassed(P, SENT, 0)) == [(P, "ProtocolError"), (C, "ProtocolError")]
    half = Key("thinker-0", "thinker->talker", "half")
    table.bind(Port(1, 2), half, 0)
    table.open(Port(2, 2), half, "t", 8, 0, token=7)
    table.put(Port(1, 2), piece(0, last=False), 0)
    assert len(failures(table.bypassed(Port(1, 2), SENT, 0))) == 2
    done = Key("thinker-0", "thinker->talker", "done")
    table.bind(Port(1, 3), done, 0)
    table.open(Port(2, 3), done, "t", 1, 0, token=7)
    table.put(Port(1, 3), piece(0), 0)
    table.put(Port(1, 3), piece(1, finished=True), 0)
    assert len(failures(table.bypassed(Port(1, 3), SENT, 0))) == 2


def test_the_janitor_knows_what_went_past(table: StreamTable) -> None:
    """R11, R12: neither end's word is needed for the other's; a consumer that takes nothing is named."""
    a_stream_with_a_line(table)
    table.bypassed(P, SENT, 9)
    assert table.tick(18) == []
    table.taken(C, 2, 18)
    assert table.tick(27) == []
    table.bypassed(P, ((1, 0.0),) * WINDOW_PIECES, 27, starved=True)
    assert list(table.waiting()) == [(KEY, "t", WINDOW_PIECES)]
    actions = table.tick(38)
    assert failures(actions) == [(P, "DeadlineExceeded"), (C, "DeadlineExceeded")]
    assert "consumer granted no credit" in actions[0].message  # type: ignore[union-attr]


def test_a_stream_on_the_line_stands_still_until_its_producer_says_otherwise(table: StreamTable) -> None:
    a_stream_with_a_line(table)
    table.bypassed(P, SENT, 0, starved=True)
    assert table.stalled == 1
    table.bypassed(P, (), 0)
    assert table.stalled == 0


class StreamModel(RuleBasedStateMachine):
    """Producers and consumers in any interleaving. Whatever happens: in order, never lost silently, freed once."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.table = StreamTable(Limits(lease_seconds=1000))
        self.count = 0
        self.now = 0.0
        self.put_seq: dict[int, int] = {}
        self.window: dict[int, int] = {}
        self.finished: set[int] = set()
        self.got: dict[int, list[int]] = {}
        self.got_finished: set[int] = set()
        self.failed: set[Port] = set()
        self.live_pieces: set[int] = set()
        self.credits: dict[int, int] = {}
        self.direct: dict[int, int] = {}  # on the line or taken off it, and not granted again
        self.untold: dict[int, int] = {}  # of these, the sidecar has not heard from the producer
        self.counted: dict[int, int] = {}
        self.lined: dict[int, list[int]] = {}  # what was put on the line

    def key(self, n: int) -> Key:
        return Key("p", "a->b", str(n))

    def run_actions(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(consumer, _, _, item):
                    n = consumer.stream
                    assert consumer not in self.failed, "nothing follows a failure"
                    assert n not in self.got_finished, "nothing follows the finished chunk"
                    assert item.put.seq == len(self.got[n]) + self.passed(n, item.put.seq), "in order, no gap"
                    self.got[n].append(item.put.seq)
                    self.credits[n] -= 1
                    assert self.credits[n] >= 0, "never more than was granted"
                    self.live_pieces.remove(id(item))
                    if item.put.chunk is not None and item.put.chunk.finished:
                        self.got_finished.add(n)
                case Grant(producer, pieces):
                    self.window[producer.stream] += pieces
                case Count(consumer, key, _, chunks):
                    assert key == self.key(consumer.stream)
                    self.counted[int(key.request)] += len(chunks)
                case Fail(port, code, _):
                    assert code != "ProtocolError", "nobody broke a rule"
                    assert port not in self.failed, "a failure is told once"
                    self.failed.add(port)
                case Drop(item):
                    self.live_pieces.remove(id(item))

    @rule(target=requests)
    def new(self) -> int:
        self.count += 1
        return self.count

    @rule(n=requests)
    def bind(self, n: int) -> None:
        if n not in self.put_seq:
            self.put_seq[n], self.window[n] = 0, WINDOW_PIECES
            self.direct[n] = self.untold[n] = self.counted[n] = 0
            self.run_actions(self.table.bind(Port(1, n), self.key(n), self.now))

    @rule(n=requests, finished=st.booleans())
    def put(self, n: int, finished: bool) -> None:
        if n in self.put_seq and n not in self.finished and self.window[n]:
            self.window[n] -= 1
            item = piece(self.put_seq[n], finished=finished)
            self.keep = getattr(self, "keep", [])
            self.keep.append(item)  # so that ids stay unique
            self.live_pieces.add(id(item))
            self.put_seq[n] += 1
            if finished:
                self.finished.add(n)
            self.tell(n)
            self.run_actions(self.table.put(Port(1, n), item, self.now))

    def passed(self, n: int, seq: int) -> int:
        """Chunks before `seq` that went past the sidecar."""
        return sum(1 for s in self.lined.get(n, ()) if s < seq)

    @rule(n=requests)
    def put_on_the_line(self, n: int) -> None:
        if n in self.put_seq and n not in self.finished and self.window[n] and self.table.line(Port(1, n)):
            self.window[n] -= 1
            self.lined.setdefault(n, []).append(self.put_seq[n])
            self.put_seq[n] += 1
            self.direct[n] += 1
            self.untold[n] += 1

    @rule(n=requests)
    def tell(self, n: int) -> None:
        if self.untold.get(n):
            chunks, self.untold[n] = ((1, 0.0),) * self.untold[n], 0
            self.run_actions(self.table.bypassed(Port(1, n), chunks, self.now))

    @rule(n=requests, pieces=st.integers(1, 4))
    def take_off_the_line(self, n: int, pieces: int) -> None:
        if pieces <= self.direct.get(n, 0):
            self.direct[n] -= pieces
            self.run_actions(self.table.taken(Port(2, n), pieces, self.now))

    @rule(n=requests, credits=st.integers(1, 4), token=st.integers(0, 1))
    def open(self, n: int, credits: int, token: int) -> None:
        if n not in self.got:
            self.got[n], self.credits[n] = [], credits
            self.run_actions(self.table.open(Port(2, n), self.key(n), "t", credits, self.now, token))

    @rule(n=requests, credits=st.integers(1, 4))
    def credit(self, n: int, credits: int) -> None:
        if n in self.got:
            self.credits[n] += credits
            self.run_actions(self.table.credit(Port(2, n), credits, self.now))

    @rule(n=consumes(requests), side=st.sampled_from([1, 2]))
    def cancel(self, n: int, side: int) -> None:
        self.failed.add(Port(side, n))  # who cancels is told nothing more
        self.run_actions(self.table.cancel(Port(side, n), "test"))
        self.failed.discard(Port(side, n))

    @rule(side=st.sampled_from([1, 2]))
    def crash(self, side: int) -> None:
        self.run_actions(self.table.session_lost(side, "test"))
        if side == 1:
            self.window = dict.fromkeys(self.window, 0)  # the dead put nothing more

    @rule(seconds=st.sampled_from([1.0, 2000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.run_actions(self.table.tick(self.now))

    @invariant()
    def the_window_holds(self) -> None:
        for n, free in self.window.items():
            assert free + self.direct[n] <= WINDOW_PIECES

    @invariant()
    def what_was_delivered_was_counted(self) -> None:
        for n in self.got_finished:
            if n in self.counted and Port(1, n) not in self.failed:
                assert self.counted[n] == len(self.lined.get(n, ())), "before the end is told"

    @invariant()
    def every_piece_is_somewhere(self) -> None:
        assert self.table.queued_pieces == len(self.live_pieces)

    def teardown(self) -> None:
        self.run_actions(self.table.tick(self.now + 10_000))
        assert len(self.table) == 0
        assert not self.live_pieces


StreamModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStreamModel = StreamModel.TestCase
