"""The request state machine: every interleaving of events, in memory.

The rules drive one request with events in any order, from right and wrong replicas, before and after its end, and
check after each step what a client, a stage and a pool would see.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_runtime.errors import EngineError, ReplicaLost, StageUnavailable, UpstreamLost
from omni_runtime.orchestrator.actions import (
    AbortStage,
    Action,
    Cancelled,
    Complete,
    Emit,
    EmitStageEnd,
    Fail,
    Forget,
    ReleaseStage,
    Replay,
    StartSettling,
    SubmitStage,
)
from omni_runtime.orchestrator.advance import advance
from omni_runtime.orchestrator.events import (
    Bound,
    CancelRequested,
    DeadlinePassed,
    Event,
    PieceArrived,
    Rejected,
    ReplicaGone,
    SettleExpired,
    StageAborted,
    StageFailed,
    StageFinished,
    StageStarted,
)
from omni_runtime.orchestrator.spec import build_request_spec
from omni_runtime.orchestrator.state import UNSETTLED, Phase, RequestState, StagePhase, next_attempt
from omni_runtime.orchestrator.values import AudioPiece, RequestId, StageUsage, TextPiece
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.plans import a_plan

A_SAMPLE = AudioPiece(b"\0\0\0\0", 24_000, 1)
STAGES = ("thinker", "talker", "code2wav")
STAGE = st.sampled_from(STAGES)
REPLICA = st.sampled_from(("right", "right", "right", "wrong"))
TERMINAL = (Complete, Fail, Cancelled, Replay)  # a replay is the end of this attempt, if not of the client's wait


def a_state(*modalities: str, codes: bool = False, replays: int = 0) -> RequestState:
    wanted = frozenset(Modality(m) for m in modalities or ("text", "audio"))
    spec = build_request_spec(a_plan(), RequestId("r"), wanted, code_edges=codes)
    return RequestState(spec, queued_at=0.0, replays_left=replays)


def bound(state: RequestState) -> Bound:
    return Bound(tuple((s, f"{s}-right") for s in state.spec.stages))


class RequestLife(RuleBasedStateMachine):
    """One request, any events."""

    @initialize(
        modalities=st.sampled_from((("text",), ("audio",), ("text", "audio"))),
        codes=st.booleans(),
        replays=st.integers(0, 1),
    )
    def queue(self, modalities: tuple[str, ...], codes: bool, replays: int) -> None:
        self.state = a_state(*modalities, codes=codes and "audio" in modalities, replays=replays)
        self.now = 0.0
        self.actions: list[Action] = []
        self.held: set[str] = set()  # stages whose replica's place we hold

    def step(self, event: Event) -> tuple[Action, ...]:
        self.now += 1.0
        before = self.state
        self.state, actions = advance(self.state, event, self.now)
        ended = any(isinstance(a, TERMINAL) for a in self.actions)
        for action in actions:
            match action:
                case SubmitStage(stage, _):
                    assert stage not in self.held
                    self.held.add(stage)
                case ReleaseStage(stage, _) if before.phase is not Phase.QUEUED and isinstance(event, Bound):
                    pass  # places of a binding that came too late: never ours
                case ReleaseStage(stage, _):
                    self.held.remove(stage)
                case Emit() | EmitStageEnd():
                    assert not ended, "a finished request never emits"
                case Replay():
                    assert not any(isinstance(a, Emit | EmitStageEnd) for a in self.actions), "said twice"
                    aborted = {a.stage for a in (*self.actions, *actions) if isinstance(a, AbortStage)}
                    assert self.held <= aborted, "told to end before the next attempt begins"
        if before.phase is Phase.DONE:
            assert self.state == before
            assert all(isinstance(a, ReleaseStage) for a in actions)
        self.actions += actions
        return actions

    def at(self, stage: str, replica: str) -> str:
        return f"{stage}-{replica}"

    @rule()
    def bind(self) -> None:
        self.step(bound(self.state))

    @rule(stage=STAGE, replica=REPLICA)
    def started(self, stage: str, replica: str) -> None:
        self.step(StageStarted(stage, self.at(stage, replica)))

    @rule(stage=STAGE, replica=REPLICA)
    def piece(self, stage: str, replica: str) -> None:
        record = self.state.stages.get(stage)
        live = record is not None and record.phase in (StagePhase.SUBMITTED, StagePhase.STARTED)
        expected = self.state.phase is Phase.RUNNING and live and replica == "right"
        withheld = len(self.state.withheld)
        actions = self.step(PieceArrived(stage, self.at(stage, replica), TextPiece("x")))
        told = bool(actions) or len(self.state.withheld) > withheld
        assert told == expected, "nothing is lost, nothing is resurrected (R4)"

    @rule(stage=STAGE, replica=REPLICA)
    def finished(self, stage: str, replica: str) -> None:
        self.step(StageFinished(stage, self.at(stage, replica), StageUsage("stop")))

    @rule(stage=STAGE, replica=REPLICA)
    def failed(self, stage: str, replica: str) -> None:
        self.step(StageFailed(stage, self.at(stage, replica), EngineError("boom")))

    @rule(stage=STAGE, replica=REPLICA)
    def upstream_lost(self, stage: str, replica: str) -> None:
        self.step(StageFailed(stage, self.at(stage, replica), UpstreamLost("thinker->talker")))

    @rule(stage=STAGE, replica=REPLICA)
    def aborted(self, stage: str, replica: str) -> None:
        self.step(StageAborted(stage, self.at(stage, replica)))

    @rule(stage=STAGE, replica=REPLICA)
    def lost(self, stage: str, replica: str) -> None:
        self.step(ReplicaGone(stage, self.at(stage, replica), "fell silent"))

    @rule()
    def rejected(self) -> None:
        self.step(Rejected(StageUnavailable("no talker")))

    @rule()
    def cancelled(self) -> None:
        self.step(CancelRequested("client_disconnect"))

    @rule()
    def deadline(self) -> None:
        self.step(DeadlinePassed(1.0))

    @precondition(lambda self: any(isinstance(a, StartSettling) for a in self.actions))
    @rule()
    def settle(self) -> None:
        self.step(SettleExpired())

    @invariant()
    def one_terminal_at_most(self) -> None:
        assert sum(isinstance(a, TERMINAL) for a in getattr(self, "actions", ())) <= 1
        assert sum(isinstance(a, Forget) for a in getattr(self, "actions", ())) <= 1

    @invariant()
    def one_abort_per_stage_at_most(self) -> None:
        aborts = [a.stage for a in getattr(self, "actions", ()) if isinstance(a, AbortStage)]
        assert len(aborts) == len(set(aborts))

    @invariant()
    def places_are_held_exactly_while_unsettled(self) -> None:
        if hasattr(self, "state"):
            assert self.held == {n for n, r in self.state.stages.items() if r.phase in UNSETTLED}

    def teardown(self) -> None:
        """Whatever happened: after a cancel and the settle time, nothing is left and everybody was told."""
        if not hasattr(self, "state"):
            return
        self.step(CancelRequested("end of test"))
        for _ in range(2):
            self.step(SettleExpired())
        assert self.state.phase is Phase.DONE
        assert not self.held
        assert sum(isinstance(a, TERMINAL) for a in self.actions) == 1
        aborted = {a.stage for a in self.actions if isinstance(a, AbortStage)}
        for stage, record in self.state.stages.items():
            heard = record.phase in (StagePhase.FINISHED, StagePhase.FAILED, StagePhase.LOST)
            assert heard or stage in aborted, "a submitted stage was neither heard of nor aborted"


TestRequestLife = RequestLife.TestCase
TestRequestLife.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def run(state: RequestState, *events: Event) -> tuple[RequestState, list[Action]]:
    actions: list[Action] = []
    for i, event in enumerate(events):
        state, more = advance(state, event, float(i))
        actions += more
    return state, actions


def test_completion_is_by_modality_set() -> None:
    """Audio may end before text: the request ends with the later of the two, whichever it is."""
    state = a_state()
    audio_first: list[Event] = [
        bound(state),
        StageFinished("code2wav", "code2wav-right", StageUsage("stop")),
        StageFinished("talker", "talker-right", StageUsage("stop")),
    ]
    state, actions = run(state, *audio_first)
    assert not any(isinstance(a, Complete) for a in actions)
    _, actions = run(state, StageFinished("thinker", "thinker-right", StageUsage("stop")))
    assert isinstance(actions[-2], Complete)
    assert isinstance(actions[-1], Forget)


def test_text_only_needs_only_the_thinker() -> None:
    assert a_state("text").spec.stages == ("thinker",)
    assert a_state("audio").spec.final == {"code2wav"}
    assert a_state("audio", codes=True).spec.final == {"code2wav", "talker"}


def test_consumers_are_submitted_first() -> None:
    state = a_state()
    _, actions = run(state, bound(state))
    assert [a.stage for a in actions if isinstance(a, SubmitStage)] == ["code2wav", "talker", "thinker"]


def test_a_stage_that_drops_a_request_fails_it() -> None:
    """R16: an abort that nobody asked for still gives the client an end."""
    state = a_state("text")
    _, actions = run(state, bound(state), StageAborted("thinker", "thinker-right"))
    assert any(isinstance(a, Fail) for a in actions)


def test_deadline_of_a_queued_request_says_so() -> None:
    _, actions = run(a_state(), DeadlinePassed(2.0))
    assert isinstance(actions[0], Fail)
    assert "still queued" in str(actions[0].error)


def test_a_stage_end_that_says_nothing_is_told_with_the_first_output() -> None:
    """Told earlier, a replay would tell it twice: its tokens would be counted twice."""
    state = a_state("audio", replays=1)
    state, actions = run(state, bound(state), StageFinished("thinker", "thinker-right", StageUsage("stop")))
    assert not any(isinstance(a, EmitStageEnd) for a in actions)
    _, actions = run(state, PieceArrived("code2wav", "code2wav-right", A_SAMPLE))
    assert [type(a) for a in actions] == [EmitStageEnd, Emit]
    _, actions = run(state, ReplicaGone("talker", "talker-right", "fell silent"))
    assert any(isinstance(a, Replay) for a in actions)


def test_text_that_is_only_spoken_waits_for_the_audio() -> None:
    """The client sees none of it, so that it is no reason not to start anew; in a whole answer it is the transcript."""
    state = a_state("audio", replays=1)
    text = [PieceArrived("thinker", "thinker-right", TextPiece(t)) for t in ("a", "b")]
    state, actions = run(state, bound(state), *text)
    assert not any(isinstance(a, Emit) for a in actions)
    _, lost = run(state, ReplicaGone("code2wav", "code2wav-right", "fell silent"))
    assert any(isinstance(a, Replay) for a in lost)
    state, actions = run(state, PieceArrived("code2wav", "code2wav-right", A_SAMPLE))
    assert [a.piece for a in actions if isinstance(a, Emit)] == [TextPiece("a"), TextPiece("b"), A_SAMPLE]
    _, lost = run(state, ReplicaGone("code2wav", "code2wav-right", "fell silent"))
    assert any(isinstance(a, Fail) for a in lost)


def test_without_replays_nothing_waits() -> None:
    state = a_state("audio")
    _, actions = run(state, bound(state), PieceArrived("thinker", "thinker-right", TextPiece("a")))
    assert any(isinstance(a, Emit) for a in actions)


def test_a_stage_that_ended_before_the_loss_is_told_as_well() -> None:
    """R11: its last chunks wait at its connector for a consumer that is dead."""
    state = a_state("audio", replays=1)
    state, _ = run(state, bound(state), StageFinished("talker", "talker-right", StageUsage("stop")))
    state, actions = run(state, ReplicaGone("code2wav", "code2wav-right", "fell silent"))
    assert {a.stage for a in actions if isinstance(a, AbortStage)} == {"thinker", "talker"}
    assert state.in_phase(StagePhase.ABORTING) == ("thinker",), "and nobody waits for its answer"


def test_what_a_stage_fails_at_is_not_tried_again() -> None:
    state = a_state(replays=1)
    _, actions = run(state, bound(state), StageFailed("talker", "talker-right", EngineError("out of memory")))
    assert any(isinstance(a, Fail) for a in actions)


def test_the_last_attempt_tells_the_first_loss_and_its_own() -> None:
    state = a_state(replays=1)
    again = next_attempt(state, RequestId("r2"), ReplicaLost("stage talker: replica a was restarted"))
    assert (again.spec.request, again.attempt, again.replays_left) == ("r2", 2, 0)
    _, actions = run(again, bound(again), ReplicaGone("code2wav", "code2wav-right", "fell silent"))
    (failed,) = (a for a in actions if isinstance(a, Fail))
    assert isinstance(failed.error, ReplicaLost)
    assert "replica a was restarted; the next attempt: stage code2wav: replica code2wav-right" in str(failed.error)
