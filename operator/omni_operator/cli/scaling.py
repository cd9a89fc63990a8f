"""`omni explain PIPELINE` and `omni replay FILE`: why replica counts are what they are, and what would have been."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import ValidationError

from omni_crds.v1alpha1.learned import LearnedCapacity
from omni_operator.autoscale.record import Replayed, read, replay
from omni_operator.autoscale.tuning import parse_tuning
from omni_operator.cli.facts import last_words
from omni_operator.cli.scaling_plot import draw
from omni_runtime.errors import OmniError

BAR = 24


class CannotExplain(OmniError):
    """kubectl gave no pipeline."""

    code = "CannotExplain"


class CannotReplay(OmniError):
    """The file is not one that can be replayed."""

    code = "CannotReplay"


def explain(
    pipeline: Annotated[str, typer.Argument(help="name of the OmniPipeline")],
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="its namespace")] = "default",
    kubectl: Annotated[str, typer.Option(help="the kubectl to ask")] = "kubectl",
    png: Annotated[Path | None, typer.Option(help="draw it into this file as well")] = None,
) -> None:
    """Why each stage has the replicas that it has: the last decisions of the autoscaler, newest first."""
    command = [kubectl, "-n", namespace, "get", "omnipipeline", pipeline, "-o", "json"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotExplain(f"{kubectl}: {error}; name another one with --kubectl") from error
    if answer.returncode != 0:
        raise CannotExplain(last_words(answer.stderr) or f"kubectl ended with {answer.returncode}")
    body = json.loads(answer.stdout)
    print("\n".join(explained(body)))
    if png is not None:
        _drawn(body, png)


def _drawn(body: Mapping[str, Any], file: Path) -> None:
    if not (body.get("status") or {}).get("decisions"):
        raise CannotExplain("--png: there is no decision to draw yet")
    try:
        draw(body, file)
    except ImportError as error:
        raise CannotExplain(f"--png: {error}; install pillow") from error


def explained(body: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `omni explain`, of an OmniPipeline as JSON."""
    status = body.get("status") or {}
    ready: Mapping[str, Any] = next((c for c in status.get("conditions") or () if c.get("type") == "ScalingReady"), {})
    yield f"{body['metadata']['name']}: ScalingReady {ready.get('status', 'Unknown')}, {ready.get('reason', 'nothing said yet')}"
    yield f"  {ready.get('message', '')}"
    yield from learned(status.get("learned"))
    decisions = status.get("decisions") or ()
    if not decisions:
        yield "  no decision yet: no stage has scaling.mode Operator, or nothing has changed"
        return
    most = max((s.get("replicas", 0) for d in decisions for s in d.get("stages") or ()), default=1) or 1
    for decision in decisions:
        limits = decision.get("limitingStage")
        yield ""
        yield f"{decision['time']}  {decision['reason']}" + (f"  (limiting: {limits})" if limits else "")
        yield f"  {decision.get('message', '')}"
        for stage in decision.get("stages") or ():
            before, now = stage.get("before", 0), stage.get("replicas", 0)
            change = f"{before} -> {now}" if before != now else f"{now}"
            bar = "#" * round(BAR * now / most)
            yield f"  {stage['name']:<14}{change:>10}  {bar:<{BAR}}  {stage.get('reason', '')}"
        for name in ("inputs", "candidates"):
            if decision.get(name):
                yield f"  {name}: {decision[name]}"


def learned(raw: object) -> Iterator[str]:
    """What one replica of each stage can do, as far as it has been measured."""
    try:
        known = LearnedCapacity.model_validate(raw)
    except ValidationError:
        return
    yield f"  one replica, as measured until {known.time}:"
    for stage in known.stages:
        yield (
            f"  {stage.name:<14}{stage.requests_per_hour / 3600:>7.2f} requests/s alone, {stage.reserve_thousandths / 1000:.2f} in reserve; "
            f"{stage.step_nanoseconds / 1e6:.3g} ms a unit at {stage.batch_thousandths / 1000:.1f} requests at once, "
            f"{stage.slope_nanoseconds / 1e6:.2g} ms more for each further one; "
            f"{stage.work_thousandths / 1000:.0f} units a request"
        )


def replay_file(
    file: Annotated[Path, typer.Argument(help="windows that the operator recorded with --record-windows")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="a tuning to try, such as --set scale_down_seconds=60")
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="every window, not only those with a change")] = False,
) -> None:
    """Run decide() again over recorded windows; with --set, show where it would have decided otherwise."""
    changes = parse_tuning(change or ())
    try:
        records = list(read(file))
    except (OSError, msgspec.MsgspecError) as error:
        raise CannotReplay(f"{file}: {error}") from error
    print("\n".join(compared(replay(records), replay(records, changes) if changes else None, every=every)))


def compared(was: Iterable[Replayed], other: Iterable[Replayed] | None, *, every: bool = False) -> Iterator[str]:
    """One line per decision that changes something, or, with `other`, that differs."""
    others = iter(other) if other is not None else None
    differing = total = 0
    for replayed in was:
        total += 1
        would = next(others).decision if others is not None else None
        decision = replayed.decision
        counts = _counts({s.name: (s.current, s.target) for s in decision.stages})
        differs = would is not None and [s.target for s in would.stages] != [s.target for s in decision.stages]
        differing += differs
        if every or (differs if would is not None else bool(decision.changes)):
            line = f"{replayed.record.now:.0f}  {decision.reason:<16}{counts}  {decision.message}"
            if would is not None and differs:
                line += f"\n{'':>12}would be: {_counts({s.name: (s.current, s.target) for s in would.stages})}  {would.message}"
            yield line
    yield f"{total} windows" + (f", {differing} decided otherwise" if others is not None else "")


def _counts(stages: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} {a}" + (f"->{b}" if a != b else "") for name, (a, b) in stages.items())
