"""A sidecar that meets a fault of its own: after SIGUSR1 the next frame of an engine called *-0 raises what nobody expects."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from omni_runtime.connectors.engine_session import EngineSession
from omni_runtime.connectors.sidecar import main

_hear = EngineSession.on_frame


def _fail_once(self: EngineSession, header: bytes, body: bytes) -> None:
    if self.replica.endswith("-0"):
        EngineSession.on_frame = _hear  # type: ignore[method-assign]
        raise RuntimeError("a fault of the sidecar")
    _hear(self, header, body)


def _arm(_: int, __: FrameType | None) -> None:
    EngineSession.on_frame = _fail_once  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _arm)
    sys.exit(main())
