"""Plots as PNG, with pillow alone: attainment over hours per trace, and replicas over time of ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.autoscale_sim.runs import Result
from benchmarks.autoscale_sim.stack import STAGES
from benchmarks.autoscale_sim.summary import Row

SCALE = 2  # drawn twice as large, then halved: smooth edges without an antialiasing renderer
WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52
LINE_HEIGHT = 13
INK, GRID, PAPER = (40, 40, 48), (225, 225, 230), (255, 255, 255)
OURS, ORACLE, BASELINE = (200, 50, 60), (60, 140, 80), (90, 110, 160)
LINES = ((200, 50, 60), (50, 110, 180), (220, 150, 40))


class Chart:
    """Axes and marks; x and y in data units."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str]) -> None:
        self.image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
        self._draw = ImageDraw.Draw(self.image)
        self._x, self._y = x, y
        self._labels: list[tuple[float, float, float]] = []  # left, top, width
        self._text((LEFT, 2), title, size=15)
        self._text((WIDTH / 2 - 40, HEIGHT - 20), labels[0])
        self._text((8, TOP - 14), labels[1])

    def _text(self, at: tuple[float, float], text: str, size: int = 12, color: tuple[int, int, int] = INK) -> None:
        self._draw.text((at[0] * SCALE, at[1] * SCALE), text, fill=color, font=ImageFont.load_default(size * SCALE))

    def _at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self._x, self._y
        return (
            (LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)) * SCALE,
            (HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)) * SCALE,
        )

    def ticks(self, xs: Sequence[float], ys: Sequence[float], form: tuple[str, str] = ("{:g}", "{:g}")) -> None:
        for x in xs:
            self._draw.line([self._at(x, self._y[0]), self._at(x, self._y[1])], fill=GRID, width=SCALE)
            px, _ = self._at(x, 0)
            self._text((px / SCALE - 10, HEIGHT - BOTTOM + 6), form[0].format(x))
        for y in ys:
            self._draw.line([self._at(self._x[0], y), self._at(self._x[1], y)], fill=GRID, width=SCALE)
            _, py = self._at(self._x[0], y)
            self._text((8, py / SCALE - 8), form[1].format(y))

    def point(self, x: float, y: float, name: str, color: tuple[int, int, int], half: tuple[float, float]) -> None:
        px, py = self._at(x, y)
        radius = (6 if color != BASELINE else 4) * SCALE
        self._draw.line([self._at(x - half[0], y), self._at(x + half[0], y)], fill=color, width=SCALE)
        self._draw.line([self._at(x, y - half[1]), self._at(x, y + half[1])], fill=color, width=SCALE)
        self._draw.ellipse([px - radius, py - radius, px + radius, py + radius], fill=color)
        self._label(px / SCALE + 8, py / SCALE - 7, name, color)

    def _label(self, x: float, y: float, name: str, color: tuple[int, int, int]) -> None:
        """Below the labels that it would cover, with a line from its point where that moves it."""
        wide, top = 7 * len(name), y
        while any(abs(y - b) < LINE_HEIGHT and x < a + w and a < x + wide for a, b, w in self._labels):
            y += LINE_HEIGHT
        self._labels.append((x, y, wide))
        if y > top:
            x += 14
            ends = [(x - 20, top + 9), (x - 3, y + 8)]
            self._draw.line([(a * SCALE, b * SCALE) for a, b in ends], fill=color, width=SCALE)
        self._text((x, y), name, color=color)

    def steps(self, points: Sequence[tuple[float, float]], color: tuple[int, int, int], name: str, row: int) -> None:
        path: list[tuple[float, float]] = []
        for x, y in points:
            if path:
                path.append((self._at(x, 0)[0], path[-1][1]))
            path.append(self._at(x, y))
        if len(path) > 1:
            self._draw.line(path, fill=color, width=2 * SCALE)
        self._text((WIDTH - 150, TOP + 16 * row), name, color=color)

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(file, optimize=True)


def front(trace: str, table: Sequence[Row], file: Path) -> None:
    """Attainment over accelerator-hours of every policy; upper left is better."""
    mine = [r for r in table if r.trace == trace]
    most = max(r.hours.mean + r.hours.half for r in mine)
    least = min(0.9, min(r.attainment.mean for r in mine))
    bottom = max(0.0, int(least * 10) / 10)
    chart = Chart(
        f"{trace}: who attains what for how much",
        (0, most * 1.12),
        (bottom, 1.02),
        ("accelerator-hours", "TTFP attained"),
    )
    step = max(5, round(most / 6 / 5) * 5)
    tenths = [bottom + 0.1 * i for i in range(11) if bottom + 0.1 * i <= 1.001]
    chart.ticks([x for x in range(0, int(most) + step, step) if x <= most * 1.12], tenths, ("{:g}", "{:.1f}"))
    for row in sorted(mine, key=lambda r: (-r.attainment.mean, r.hours.mean)):
        color = {"ours": OURS, "ours_known": OURS, "oracle": ORACLE}.get(row.policy, BASELINE)
        chart.point(row.hours.mean, row.attainment.mean, row.policy, color, (row.hours.half, row.attainment.half))
    chart.save(file)


def timeline(result: Result, file: Path) -> None:
    """Ready replicas of each stage, and the requests per second, over one run."""
    points = result.points
    end = points[-1][0]
    rates = [(b[0], (b[-1] - a[-1]) / max(1e-9, b[0] - a[0])) for a, b in pairwise(points)]
    top = max(*(max(p[1:4]) for p in points), *(r for _, r in rates)) * 1.15
    chart = Chart(f"{result.trace}: {result.policy}", (0, end), (0, top), ("seconds", "ready replicas, requests/s"))
    chart.ticks(
        range(0, int(end) + 1, max(600, int(end / 6) // 600 * 600)), range(0, int(top) + 1, max(1, int(top / 6)))
    )
    chart.steps(rates, (190, 190, 196), "requests/s", 0)
    for i, name in enumerate(STAGES):
        chart.steps([(p[0], p[1 + i]) for p in points], LINES[i], name, i + 1)
    chart.save(file)
