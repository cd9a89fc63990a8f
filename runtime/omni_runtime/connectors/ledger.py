"""Who holds which slab: sans-io bookkeeping of the sidecar.

A slab has one holder at a time: the queue of its stream, then the consumer it was delivered to. It is freed exactly
once, by whoever holds it, and what a dead process held is freed when the process is gone and only then: a process
that merely pauses keeps its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import Slab

QUEUE: Final = 0  # holder of slabs that no consumer has seen; sessions count from 1
SIDECAR: Final = 0  # owner of slabs that the sidecar allocated for bytes from other pods


@dataclass(slots=True)
class _Held:
    owner: int
    holder: int


@dataclass(slots=True)
class SlabLedger:
    _slabs: dict[Slab, _Held] = field(default_factory=dict)
    _by_holder: dict[int, set[Slab]] = field(default_factory=dict)
    _by_owner: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._slabs)

    @property
    def bytes(self) -> int:
        return sum(slab.length for slab in self._slabs)

    def outstanding(self, owner: int) -> int:
        return self._by_owner.get(owner, 0)

    def enter(self, slab: Slab, owner: int) -> None:
        if slab in self._slabs:
            raise ProtocolError(f"slab at {slab.offset} was put twice")
        self._slabs[slab] = _Held(owner, QUEUE)
        self._by_holder.setdefault(QUEUE, set()).add(slab)
        self._by_owner[owner] = self._by_owner.get(owner, 0) + 1

    def deliver(self, slab: Slab, session: int) -> None:
        held = self._slabs[slab]
        self._unhold(slab, held.holder)
        held.holder = session
        self._by_holder.setdefault(session, set()).add(slab)

    def release(self, slab: Slab, holder: int) -> int | None:
        """The owner to whom the slab returns, or None if `holder` does not hold it (late or repeated release)."""
        held = self._slabs.get(slab)
        if held is None or held.holder != holder:
            return None
        del self._slabs[slab]
        self._unhold(slab, holder)
        left = self._by_owner[held.owner] - 1
        if left:
            self._by_owner[held.owner] = left
        else:
            del self._by_owner[held.owner]
        return held.owner

    def held_by(self, holder: int) -> tuple[Slab, ...]:
        return tuple(self._by_holder.get(holder, ()))

    def _unhold(self, slab: Slab, holder: int) -> None:
        slabs = self._by_holder[holder]
        slabs.discard(slab)
        if not slabs:
            del self._by_holder[holder]
