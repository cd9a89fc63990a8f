"""Refuse to act while an installed CRD is older than this operator: the server would prune fields that we rely on, and
the operator would take the pruned objects for the users' wishes (T58)."""

from __future__ import annotations

import time
from collections.abc import Callable

from omni_crds import SCHEMA_VERSION, schema_is_outdated
from omni_operator import logs, metrics
from omni_operator.errors import NotFound, OperatorError
from omni_operator.kinds import CRD
from omni_operator.kube import KubeApi
from omni_operator.rbac import CRD_NAMES

FRESH_SECONDS = 60.0
FRESH_WHILE_OUTDATED_SECONDS = 5.0


class CrdOutdated(OperatorError):
    """Nothing is written until the CRDs are upgraded."""


class CrdGuard:
    """Asked before each reconcile; looks at the cluster at most once a minute (every 5 s while it says no)."""

    def __init__(self, kube: KubeApi, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._monotonic = monotonic
        self._checked_at: float | None = None
        self.outdated: tuple[str, ...] = ()

    async def check(self) -> None:
        """Raises CrdOutdated, or KubeError where the CRDs cannot be read."""
        limit = FRESH_WHILE_OUTDATED_SECONDS if self.outdated else FRESH_SECONDS
        if self._checked_at is None or self._monotonic() - self._checked_at > limit:
            outdated = []
            for name in CRD_NAMES:
                try:
                    crd = await self._kube.get(CRD, None, name)
                except NotFound:
                    outdated.append(name)
                    continue
                if schema_is_outdated((crd.get("metadata") or {}).get("annotations")):
                    outdated.append(name)
            self.outdated = tuple(outdated)
            self._checked_at = self._monotonic()
            metrics.CRD_OUTDATED.set(bool(outdated))
        if self.outdated:
            message = f"older than schema version {SCHEMA_VERSION}, or not installed: {', '.join(self.outdated)}"
            logs.error("crds.outdated", crds=self.outdated, fix="apply the CRDs of this operator's version")
            raise CrdOutdated(message)
