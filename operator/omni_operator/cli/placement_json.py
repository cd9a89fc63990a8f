"""A verdict as plain values, for scripts. The names are stable; new ones may be added."""

from __future__ import annotations

from typing import Any

from omni_operator.placement import Feasible, FeasibleIfNodesAreAdded, Infeasible, Verdict, Witness


def placement_json(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    answer: dict[str, Any] = {
        "verdict": type(verdict).__name__,
        "memory": [
            {
                "stage": m.stage,
                "deviceClass": m.device_class,
                "devices": m.devices,
                "capacityBytes": m.capacity,
                "budgetBytes": m.budget,
                "needBytes": m.need,
                "missingBytes": m.missing,
                "known": m.known,
                "terms": [{"name": t.name, "bytes": t.bytes, "source": t.source, "detail": t.detail} for t in m.terms],
            }
            for m in verdict.memory
        ],
        "warnings": [{"code": w.code, "message": w.message, "path": w.path} for w in verdict.warnings],
    }
    if isinstance(verdict, Feasible):
        answer["placements"] = _placements(verdict.witness)
    elif isinstance(verdict, FeasibleIfNodesAreAdded):
        answer["placements"] = _placements(verdict.witness)
        answer["addedNodes"] = [
            {"name": n.name, "allocatable": dict(n.allocatable)} for n in verdict.witness.added_nodes
        ]
    if isinstance(verdict, (Infeasible, FeasibleIfNodesAreAdded)):
        answer["constraint"] = {"kind": verdict.constraint.kind.value, "message": verdict.constraint.message}
        answer["fixes"] = [{"text": f.text, "path": f.path, "value": f.value} for f in verdict.fixes]
    if isinstance(verdict, Infeasible):
        answer["proven"] = verdict.proven
        answer["errors"] = [
            {"path": e.path, "value": e.value, "problem": e.problem, "fix": e.fix} for e in verdict.errors
        ]
    return answer


def _placements(witness: Witness | None) -> list[dict[str, Any]]:
    if witness is None:
        return []
    return [{"group": p.group, "replica": p.replica, "node": p.node} for p in witness.placements]
