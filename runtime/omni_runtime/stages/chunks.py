"""How the frames of one request are cut into chunks on their way to the next stage, and which samples of a decoded
chunk are new. Pure: no clock, no engine.

Cutting decides when audio leaves, never what it sounds like: every frame is sent exactly once and in order, and a
consumer sees `left_context` frames before a chunk again.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_runtime.deploy.plan import FULL_PAYLOAD_MESSAGE_FRAMES, EdgePlan

CONSUMER_BEHIND = 2  # chunks that wait for the consumer; from here on larger ones serve it better


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """initial, regular: frames of the first chunk and the largest of the further ones.

    whole: nothing leaves before the last frame is there. ramp: each chunk is twice the one before, from initial to
    regular. adaptive: as small as initial while the consumer waits for work, twice as large each time that it is
    behind: small chunks arrive early, large ones cost the consumer less per frame.
    """

    initial: int
    regular: int
    whole: bool = False
    ramp: bool = False
    adaptive: bool = False

    @classmethod
    def of(cls, edge: EdgePlan) -> ChunkPolicy:
        if edge.mode == "fullPayload":
            return cls(FULL_PAYLOAD_MESSAGE_FRAMES, FULL_PAYLOAD_MESSAGE_FRAMES, whole=True)
        return cls(edge.initial_frames, edge.frames, ramp=edge.sizing == "ramp", adaptive=edge.sizing == "adaptive")


class ChunkPlanner:
    """Sizes of one request's chunks."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self._size = policy.initial
        self._begun = False

    def take(self, held: int, *, flush: bool) -> tuple[int, ...]:
        """Of `held` frames that have not left, the chunks that leave now, in order; with `flush`, all of them.

        flush: no frame will join those that are held (the end of a phrase, or of the request).
        """
        if self._policy.whole and not flush:
            return ()
        sizes: list[int] = []
        while held >= self._size or (flush and held > 0):
            size = min(self._size, held)
            sizes.append(size)
            held -= size
            self._after_chunk()
        return tuple(sizes)

    def feedback(self, waiting: int) -> None:
        """The consumer has taken a chunk, and `waiting` others lie ready for it. The first chunk is small whatever it says."""
        if not (self._policy.adaptive and self._begun):
            return
        if waiting == 0:
            self._size = max(self._policy.initial, self._size // 2)
        elif waiting >= CONSUMER_BEHIND:
            self._size = min(self._policy.regular, self._size * 2)

    def _after_chunk(self) -> None:
        self._begun = True
        if self._policy.ramp:
            self._size = min(self._policy.regular, self._size * 2)
        elif not self._policy.adaptive:
            self._size = self._policy.regular


def context_frames(start: int, left_context: int) -> int:
    """Frames before a chunk at `start` that its decoder sees again."""
    return min(start, left_context)


def kept_samples(context: int, frames: int, upsample: int, tail: int) -> tuple[int, int]:
    """Which samples of a run over `context` + `frames` frames are new: all that the run before did not give.

    tail: samples that a run of the decoder loses at its end; the next run, which sees its left context, has them.
    """
    return max(0, context * upsample - tail), (context + frames) * upsample - tail
