"""Steps over fixed buffers, captured as CUDA graphs where there is a CUDA device.

A step of the talker is a few thousand small kernels; launching them one by one costs more than running them. A graph
replays them at once, but reads and writes the same memory every time: a step takes its inputs from buffers that its
owner keeps, and its shape from a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from omni_runtime.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a captured step is fixed to. rows: slots 0..rows-1; length: cache positions that are read; greedy: no row
    draws."""

    rows: int
    length: int
    greedy: bool


Step = Callable[[Bucket], torch.Tensor]


class StepRunner(Protocol):
    def bucket(self, rows: int, length: int, *, greedy: bool) -> Bucket:
        """The smallest bucket that holds so many rows and positions."""

    def run(self, bucket: Bucket) -> torch.Tensor:
        """One step; the result is valid until the next step of that bucket."""


class EagerSteps:
    """No buckets: exactly the rows and positions that are needed."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def bucket(self, rows: int, length: int, *, greedy: bool) -> Bucket:
        return Bucket(rows, length, greedy)

    def run(self, bucket: Bucket) -> torch.Tensor:
        return self._step(bucket)


class BucketedSteps:
    """Rows and lengths rounded up to powers of two, so that there are few shapes.

    fixed: one shape only, the largest. Kernels choose their algorithm by shape, and with it the order of additions;
    with one shape a request's codes are the same bits whatever else is in the batch, in every precision.
    """

    SMALLEST_LENGTH = 256

    def __init__(self, step: Step, *, rows: int, length: int, fixed: bool) -> None:
        self._step = step
        self._rows, self._length, self._fixed = rows, length, fixed

    def bucket(self, rows: int, length: int, *, greedy: bool) -> Bucket:
        if self._fixed:
            return Bucket(self._rows, self._length, greedy)
        return Bucket(_round_up(rows, 1, self._rows), _round_up(length, self.SMALLEST_LENGTH, self._length), greedy)

    def run(self, bucket: Bucket) -> torch.Tensor:
        return self._step(bucket)


class GraphedSteps(BucketedSteps):
    """One CUDA graph a bucket, captured when the bucket is first needed.

    idle: runs a function while no slot counts as active, because a capture is preceded by trial runs, which must leave
    every request as it was. A capture that fails (a kernel that waits for the host) is logged once with its reason;
    the steps then run one kernel after the other.
    """

    TRIALS = 2

    def __init__(
        self, step: Step, *, rows: int, length: int, fixed: bool, idle: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__(step, rows=rows, length=length, fixed=fixed)
        self._idle = idle
        self._graphs: dict[Bucket, tuple[Any, torch.Tensor]] = {}
        self._pool: Any = None
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Why there are no graphs; None as long as capturing works."""
        return self._problem

    def warm(self) -> None:
        """Capture every bucket in which rows draw, the usual case, so that no request pays for it."""
        rows = [1]
        while rows[-1] < self._rows:
            rows.append(min(2 * rows[-1], self._rows))
        lengths = [min(self.SMALLEST_LENGTH, self._length)]
        while lengths[-1] < self._length:
            lengths.append(min(2 * lengths[-1], self._length))
        for bucket in {self.bucket(r, n, greedy=False) for r in rows for n in lengths}:
            if self._problem is None and bucket not in self._graphs:
                self._try_capture(bucket)

    def run(self, bucket: Bucket) -> torch.Tensor:
        if self._problem is None and bucket not in self._graphs:
            self._try_capture(bucket)
        if self._problem is not None:
            return self._step(bucket)
        graph, result = self._graphs[bucket]
        graph.replay()
        return result

    def _try_capture(self, bucket: Bucket) -> None:
        try:
            self._idle(lambda: self._capture(bucket))
        except (RuntimeError, NotImplementedError) as error:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._graphs.clear()
            self._problem = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("talker.graphs_off", reason=self._problem, rows=bucket.rows, length=bucket.length)

    def _capture(self, bucket: Bucket) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.TRIALS):  # libraries allocate their workspaces outside of the graph
                self._step(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(bucket)
        self._pool = self._pool or graph.pool()
        self._graphs[bucket] = (graph, result)


def _round_up(value: int, smallest: int, largest: int) -> int:
    size = smallest
    while size < value:
        size *= 2
    return min(size, largest)
