"""`omni explain --png`: replicas of each stage over the last decisions, and below them why, as one picture.

Drawn with pillow, which is no dependency of the operator: it is imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import ImageDraw

SCALE = 2  # drawn twice as large, then halved: smooth edges
WIDTH, LEFT, RIGHT = 980, 118, 28
PANEL, GAP, TOP, ROW = 74, 16, 64, 34
INK, SOFT, GRID, PAPER = (40, 40, 48), (120, 120, 130), (228, 228, 233), (255, 255, 255)
COLOURS = ((200, 50, 60), (50, 110, 180), (220, 150, 40), (70, 140, 90), (130, 90, 160), (90, 90, 100))
CROWDED = 0.09  # share of the width that the label of a change takes
CHARACTERS = 128  # of a line of text that fits beside the time

Step = tuple[float, int]


def history(decisions: Sequence[Mapping[str, Any]]) -> dict[str, list[Step]]:
    """Stage -> (seconds, replicas from then on), oldest first. decisions: as in the status, newest first."""
    found: dict[str, list[Step]] = {}
    for decision in reversed(decisions):
        at = _seconds(decision)
        for stage in decision.get("stages") or ():
            steps = found.setdefault(str(stage["name"]), [])
            if not steps:
                steps.append((at, int(stage.get("before", stage.get("replicas", 0)))))
            steps.append((at, int(stage.get("replicas", 0))))
    return found


def draw(body: Mapping[str, Any], file: Path) -> None:
    """body: an OmniPipeline as JSON, with decisions. Raises ImportError without pillow."""
    from PIL import Image, ImageDraw

    status = body.get("status") or {}
    decisions = list(status.get("decisions") or ())
    stages = history(decisions)
    chart = TOP + len(stages) * (PANEL + GAP)
    height = chart + 30 + ROW * len(decisions) + 16
    image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), PAPER)
    pen = _Pen(ImageDraw.Draw(image))
    ready: Mapping[str, Any] = next((c for c in status.get("conditions") or () if c.get("type") == "ScalingReady"), {})
    pen.text(20, 12, f"{body['metadata']['name']}: replicas, and why", size=17)
    pen.text(20, 36, f"ScalingReady {ready.get('status', 'Unknown')}: {ready.get('message', '')}"[:150], SOFT)
    times = [_seconds(d) for d in decisions]
    first, last = min(times), max(times)
    pad = max(15.0, 0.05 * (last - first))
    span = (first - pad, last + pad)
    for number, (name, steps) in enumerate(stages.items()):
        _panel(pen, TOP + number * (PANEL + GAP), name, steps, span, COLOURS[number % len(COLOURS)], times)
    _list(pen, chart + 4, decisions, list(stages))
    file.parent.mkdir(parents=True, exist_ok=True)
    image.resize((WIDTH, height), Image.Resampling.LANCZOS).save(file, optimize=True)


class _Pen:
    def __init__(self, canvas: ImageDraw.ImageDraw) -> None:
        self.canvas = canvas

    def text(self, x: float, y: float, said: str, colour: tuple[int, int, int] = INK, size: int = 12) -> None:
        from PIL import ImageFont

        self.canvas.text((x * SCALE, y * SCALE), said, fill=colour, font=ImageFont.load_default(size * SCALE))

    def line(self, points: Sequence[tuple[float, float]], colour: tuple[int, int, int], width: float = 1) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self.canvas.line(scaled, fill=colour, width=round(width * SCALE))


def _panel(
    pen: _Pen,
    top: float,
    name: str,
    steps: Sequence[Step],
    span: tuple[float, float],
    colour: tuple[int, int, int],
    times: Sequence[float],
) -> None:
    most = max(1, *(count for _, count in steps))

    def at(seconds: float, count: float) -> tuple[float, float]:
        share = (seconds - span[0]) / (span[1] - span[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT), top + PANEL - count / (most * 1.15) * PANEL

    pen.text(20, top + PANEL / 2 - 14, name, colour, 14)
    for seconds in times:
        pen.line([at(seconds, 0), at(seconds, most * 1.15)], GRID)
    pen.line([at(span[0], 0), at(span[1], 0)], SOFT)
    pen.text(LEFT - 22, at(0, most)[1] - 8, str(most), SOFT)
    pen.text(LEFT - 22, top + PANEL - 10, "0", SOFT)
    path = [at(span[0], steps[0][1])]
    for seconds, count in steps:
        path += [at(seconds, _count_at(path, top, most)), at(seconds, count)]
    path.append(at(span[1], steps[-1][1]))
    pen.line(path, colour, 2.5)
    for (seconds, count), before in _changes(steps, (span[1] - span[0]) * CROWDED):
        x, y = at(seconds, count)
        pen.text(x + 4, y - 15, f"{before} to {count}", colour, 11)


def _changes(steps: Sequence[Step], crowded: float) -> list[tuple[Step, int]]:
    """(step, count before it); changes within `crowded` seconds of each other are one, or their labels would overlap."""
    found: list[tuple[Step, int]] = []
    before = steps[0][1]
    for seconds, count in steps[1:]:
        if count == before:
            continue
        if found and seconds - found[-1][0][0] < crowded:
            before = found.pop()[1]
        found.append(((seconds, count), before))
        before = count
    return found


def _count_at(path: Sequence[tuple[float, float]], top: float, most: int) -> float:
    """Back from the height of the last point to its count: a step keeps it until the next one."""
    return (top + PANEL - path[-1][1]) / PANEL * most * 1.15


def _list(pen: _Pen, top: float, decisions: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> None:
    pen.text(20, top, "newest first", SOFT)
    for number, decision in enumerate(decisions):
        y = top + 22 + number * ROW
        limits = decision.get("limitingStage")
        colour = COLOURS[stages.index(limits) % len(COLOURS)] if limits in stages else INK
        head = str(decision.get("reason", "")) + (f", {limits} limits" if limits else "")
        pen.text(20, y, str(decision.get("time", ""))[11:19], SOFT)
        pen.text(LEFT, y, head, colour)
        why = [f"{s['name']}: {s.get('reason', '')}" for s in decision.get("stages") or () if _moved(s)]
        pen.text(LEFT, y + 15, "; ".join([str(decision.get("message", "")), *why])[:CHARACTERS], SOFT, 11)


def _moved(stage: Mapping[str, Any]) -> bool:
    return bool(stage.get("before") != stage.get("replicas"))


def _seconds(decision: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(str(decision["time"])).timestamp()
