"""Kubernetes Events (events.k8s.io) with fixed reasons. The same Event is sent once; losing one harms nobody."""

from __future__ import annotations

import hashlib
import socket
from collections import OrderedDict
from collections.abc import Iterable
from datetime import UTC, datetime

from omni_crds.v1alpha1.conditions import truncate
from omni_operator import logs
from omni_operator.errors import AlreadyExists, KubeError
from omni_operator.kinds import EVENT, JsonObject
from omni_operator.kube import KubeApi
from omni_operator.names import child_name
from omni_operator.observed import Live
from omni_operator.plan.model import Note

CONTROLLER = "serving.omni.dev/omni-operator"
REMEMBERED = 4096


class EventSink:
    """Sends Events. Their name is a hash of what they say, so a restarted operator does not repeat one that still stands."""

    def __init__(self, kube: KubeApi) -> None:
        self._kube = kube
        self._sent: OrderedDict[str, None] = OrderedDict()

    async def emit(self, about: Live, namespace: str, notes: Iterable[Note]) -> None:
        for note in notes:
            event = build_event(about, namespace, note, datetime.now(UTC))
            name = event["metadata"]["name"]
            if name in self._sent:
                continue
            try:
                await self._kube.create(EVENT, namespace, event)
            except AlreadyExists:
                pass
            except KubeError as error:
                logs.warning("event.lost", reason=note.reason, message=note.message, error=error.message)
                continue
            self._sent[name] = None
            if len(self._sent) > REMEMBERED:
                self._sent.popitem(last=False)


def build_event(about: Live, namespace: str, note: Note, now: datetime) -> JsonObject:
    # The hour is part of the name: what happens again later is news again.
    said = "\0".join((about.uid, note.reason, note.message, now.strftime("%Y%m%d%H")))
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {
            "name": f"{child_name(about.name)}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
            "namespace": namespace,
        },
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": CONTROLLER,
        "reportingInstance": socket.gethostname()[:128],
        "action": "Reconcile",
        "reason": note.reason.value,
        "type": "Warning" if note.warning else "Normal",
        "note": truncate(note.message),
        "regarding": {
            "apiVersion": about.kind.api_version,
            "kind": about.kind.kind,
            "name": about.name,
            "namespace": namespace,
            "uid": about.uid,
        },
    }
